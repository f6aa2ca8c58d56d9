"""Cross entropy of the next token, without holding all logits at once."""

import functools

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.layers import DROPOUT, row_keys
from jtrain.inspect.eject.pieces.transformer import TIED, hidden_states

CHUNK: int = 128  # positions of a row whose logits exist at once
BF16_LOGITS: bool = False
KEEP: bool = False


def language_loss(params, batch, key):
    """Return the sum of nats and their number, which tokens count, and the routers' logits."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    keys = row_keys(key, batch) if DROPOUT > 0 else None
    hidden, routed = hidden_states(params, inputs, keys)
    real = jnp.broadcast_to(batch["mask"][:, None], targets.shape)
    nats = sum_nats(hidden, params["tokens" if TIED else "head"], targets, real)
    return (nats, real.sum(dtype=jnp.float32)), real, routed


product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def sum_nats(hidden, head, targets, real):
    """Return the sum of -log softmax(hidden @ head.T) at the targets that are real.

    The forward pass computes the gradient along with the logits, so that nothing is computed twice;
    the backward pass scales it.
    """
    return sum_nats_forward(hidden, head, targets, real)[0]


def sum_nats_forward(hidden, head, targets, real):
    """Return the sum, and the gradients in the hidden states and in the head."""
    (b, t, d), zeros = hidden.shape, jnp.zeros(len(hidden), jnp.float32)
    slices = chunks(hidden, targets, real)
    if KEEP:  # one product for the head, as its gradient is larger than all slopes

        def add(nats, chunk):
            more, x, slopes = nats_and_slopes(head, *chunk)
            return nats + more, (product("btv,vd->btd", slopes, head), x, slopes)

        nats, (grad_x, x, slopes) = jax.lax.scan(add, zeros, slices)
        grad_head = product("nbcv,nbcd->vd", slopes, x)
    else:

        def add_both(carry, chunk):
            nats, grad_head = carry
            more, x, slopes = nats_and_slopes(head, *chunk)
            grad_head = grad_head + product("btv,btd->vd", slopes, x)
            return (nats + more, grad_head), product("btv,vd->btd", slopes, head)

        begin = zeros, jnp.zeros(head.shape, jnp.float32)
        (nats, grad_head), grad_x = jax.lax.scan(add_both, begin, slices)
    grad_x = jnp.moveaxis(grad_x, 0, 2).reshape(b, -1, d)[:, :t]
    nats = jax.lax.optimization_barrier(nats)  # sums of rows, and then over rows
    return nats.sum(), (*jax.lax.optimization_barrier((grad_x, grad_head)), head)


def sum_nats_backward(saved, grad):
    """Scale the gradients."""
    grad_x, grad_head, head = saved
    grad_x, grad_head = ((x * grad).astype(head.dtype) for x in (grad_x, grad_head))
    return grad_x, grad_head, None, None


sum_nats.defvjp(sum_nats_forward, sum_nats_backward)


def nats_and_slopes(head, x, targets, real):
    """Return the nats of each row of a chunk, its hidden states and the gradient in its logits."""
    x = jnp.where(real[..., None], x, 0)
    stored = jnp.bfloat16 if BF16_LOGITS else jnp.float32
    logits = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=stored)
    logits = logits.astype(jnp.float32)
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    log_total = top + jnp.log(total)
    is_target = jnp.arange(len(head), dtype=targets.dtype)[None, None] == targets[..., None]
    at_target = jnp.where(is_target, logits, 0).sum(-1, keepdims=True)
    nats = jnp.where(real, (log_total - at_target)[..., 0], 0).sum(1)
    slopes = powers * (1 / total) - is_target.astype(jnp.float32)
    return nats, x, jnp.where(real[..., None], slopes, 0).astype(x.dtype)


def chunks(*arrays):
    """Cut arrays b t ... into chunks of every n-th position, n b c ...; pad the last."""
    t = arrays[0].shape[1]
    count = -(-t // CHUNK)
    size = -(-t // count)

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - t), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(len(x), size, count, *x.shape[2:]), 2, 0)

    return tuple(cut(x) for x in arrays)
