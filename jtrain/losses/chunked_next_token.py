"""Cross entropy of the next token from hidden states: the logits are never there all at once."""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.index_marks import in_range
from jtrain.core.mean import Mean
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape


def chunked_next_token(
    hidden: Float[Array, "b t d"],
    head: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    real: Bool[Array, "b t"],
    *,
    chunk: int = 128,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    place: Placement = Unplaced(),
) -> tuple[Mean, Metrics]:
    """`next_token(hidden @ head.T, targets, real)`, its value and gradient, `chunk` by `chunk`.

    Logits are there for `chunk` positions of each row at a time, in float32 whatever the inputs'
    type, and so are the sums. The gradient is computed where the logits are, in the forward pass,
    so that nothing is computed twice; it is kept until the backward pass scales it.

    Over devices: the head is gathered once and its gradient exchanged once, each part of the rows
    summing up its own until then; a vocabulary that is split stays so, and of each token its
    logits' greatest, sum and target cross. A chunk takes every n-th position, so that sequences
    that are split stay so.

    Args:
        hidden: the last hidden states.
        head: a row for each token of the vocabulary.
        targets: the next tokens; one outside 0 .. v-1 is treated as by `next_token`.
        real: which targets count; what is hidden may be NaN.
        chunk: positions of a row at a time.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        z_loss: this times the square of the log of the softmax's denominator is added to the value;
            the metrics then have both parts, `cross_entropy` and `z_loss`.
        place: where the rows and the vocabulary are.

    Raises:
        LossError: if the chunk or the cap is not positive, the rows do not divide into the parts
            that `place` has, or the shapes do not belong together.
    """
    check_labels_shape(hidden, targets, real)
    _check(len(hidden), chunk, soft_cap, place.rows)
    how = _How(chunk, soft_cap, z_loss, place, jnp.dtype(hidden.dtype))
    given = hidden, head.astype(hidden.dtype), in_range(targets, head, 0), real
    value, parts = cast(tuple[Array, _Parts], _loss(how, *given))
    parts = jax.lax.stop_gradient(parts)
    mean = lambda sums: Mean(sums.sum(), weight)
    weight = real.sum(dtype=jnp.float32)
    metrics = {"accuracy": mean(parts.hits)}
    if z_loss:
        metrics |= {"cross_entropy": mean(parts.nats), "z_loss": mean(parts.squares)}
    return Mean(value, weight), metrics


class _How(NamedTuple):
    """What is known before anything runs."""

    chunk: int
    soft_cap: float | None
    z_loss: float
    place: Placement
    dtype: np.dtype  # of the products

    def gathered(self, head: Array) -> Array:
        """The head, whole but for the vocabulary's parts: once and not for each chunk.

        Inside of what has a derivative of its own, so that its gradient need not be whole.
        """
        return self.place.constrain(head, "vocab", None)

    @property
    def unit(self) -> float:
        """What a slope is multiplied by, so that a chance of 1e-5 keeps its digits in float16."""
        return 4096.0 if self.dtype == jnp.float16 else 1.0


class _Parts(NamedTuple):
    """Sums over the real tokens of each row, b."""

    nats: Array
    squares: Array
    hits: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(how, hidden, head, targets, real):
    head = how.gathered(head)

    def add(parts, slices):
        here, *_ = _chunk(how, head, *slices)
        return jax.tree.map(jnp.add, parts, here), None

    parts, _ = jax.lax.scan(add, _no_parts(hidden), _slices(how, hidden, targets, real))
    return _value(how, parts), parts


def _forward(how, hidden, head, targets, real):
    (b, t, d), head = hidden.shape, how.gathered(head)
    here = how.place.rows, how.place.times  # s p: a sum for each part of rows and of time
    apart = lambda x: x.reshape(here[0], b // here[0], here[1], -1, x.shape[-1])  # s b/s p c/p .
    placed = lambda x: how.place.constrain(x, "rows", "time", "vocab", None)

    def add(carry, slices):
        parts, grad_head = carry
        more, x, slopes = _chunk(how, head, *slices)
        grad_x = _product("btv,vd->btd", slopes, head)
        grad_head = placed(grad_head + _product("sbptv,sbptd->spvd", apart(slopes), apart(x)))
        return (jax.tree.map(jnp.add, parts, more), grad_head), grad_x

    start = _no_parts(hidden), placed(jnp.zeros((*here, *head.shape), _wide(how.dtype)))
    (parts, grad_head), grad_x = jax.lax.scan(add, start, _slices(how, hidden, targets, real))
    grad_x = jnp.moveaxis(grad_x, 0, 2).reshape(b, -1, d)[:, :t]
    # Nobody waits for the sum: without a barrier it stays whole through the layers' backward pass.
    grad_head = how.place.constrain(grad_head.sum((0, 1)), "vocab", "split")
    grad_x, grad_head = jax.lax.optimization_barrier((grad_x, grad_head))
    return (_value(how, parts), parts), (grad_x, grad_head)


def _backward(how, gradients, upstream):
    scale = upstream[0] / how.unit  # the parts' gradient is stopped
    grad_x, grad_head = ((x * scale).astype(how.dtype) for x in gradients)
    none = np.zeros(grad_x.shape[:2], jax.dtypes.float0)
    return grad_x, grad_head, none, none


_loss.defvjp(_forward, _backward)


def _chunk(how, head, x, targets, real):
    """The parts of some tokens, their hidden states, and the slope of the value in each logit."""
    x = jnp.where(real[..., None], x, 0)  # what is not real may be NaN
    logits = how.place.constrain(_product("btd,vd->btv", x, head), "rows", "time", "vocab")
    bent = None
    if how.soft_cap is not None:
        bent = jnp.tanh(logits / how.soft_cap)
        logits = how.soft_cap * bent
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    log_total = top + jnp.log(total)  # b t 1
    targets = targets[..., None]
    tokens = jnp.arange(len(head), dtype=targets.dtype)[None, None]
    own = targets.clip(0, len(head) - 1)
    at_target = jnp.where(tokens == own, logits, 0).sum(-1, keepdims=True)
    # The first of the greatest, as argmax gives, which XLA:CPU does one number at a time.
    likeliest = jnp.where(logits == top, tokens, len(head)).min(-1, keepdims=True)
    by_row = lambda x: jnp.where(real, x[..., 0], 0).sum(1)
    parts = _Parts(
        nats=by_row(log_total - at_target),
        squares=by_row(jnp.square(log_total)),
        hits=by_row((likeliest == targets).astype(logits.dtype)),
    )
    slopes = powers * ((1 + 2 * how.z_loss * log_total) / total)
    slopes -= (tokens == own).astype(slopes.dtype)
    if bent is not None:
        slopes *= 1 - jnp.square(bent)
    slopes = jnp.where(real[..., None], how.unit * slopes, 0)
    return parts, x, slopes.astype(how.dtype)


def _value(how, parts):
    return (parts.nats + how.z_loss * parts.squares).sum()


def _no_parts(hidden):
    return _Parts(*[jnp.zeros(len(hidden), _wide(hidden.dtype))] * 3)


def _slices(how, *by_token):
    """Each array b t ... as chunks of every n-th position, n b c ...; rounded up by no tokens."""
    t = by_token[0].shape[1]
    chunks = -(-t // how.chunk)
    size = -(-t // (chunks * how.place.times)) * how.place.times

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, chunks * size - t), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(len(x), size, chunks, *x.shape[2:]), 2, 0)

    return tuple(cut(x) for x in by_token)


def _product(dims, x, y):
    return jnp.einsum(dims, x, y, preferred_element_type=_wide(x.dtype))


def _wide(dtype):
    return jnp.float32 if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def _check(rows, chunk, soft_cap, parts):
    if chunk < 1:
        raise LossError(f"a chunk of {chunk} positions is none. Give at least chunk=1; or 128.")
    if soft_cap is not None and not soft_cap > 0:
        raise LossError(
            f"a soft cap of {soft_cap} bounds the logits to nothing. Give a positive number "
            f"(Gemma 2 has 30), or soft_cap=None for no bound."
        )
    if rows % parts:
        raise LossError(
            f"the {rows} rows do not divide into the {parts} parts that rows are placed in. "
            f"Nearest: {-(-rows // parts) * parts} rows, or leave `place` out."
        )
