"""Cross entropy of the next token from hidden states, without holding all logits at once."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jtrain.core.mean import Mean
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.types import Metrics
from jtrain.errors import LossError
from jtrain.losses.shapes import check_labels_shape, in_range, spread_weights


def chunked_next_token(
    hidden: Float[Array, "b t d"],
    head: Float[Array, "v d"],
    targets: Integer[Array, "b t"],
    real: Bool[Array, "b t"],
    weights: Shaped[Array, "b *w"] | None = None,
    *,
    chunk: int = 128,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    logits: Literal["float32", "bfloat16"] = "float32",
    placement: Placement = Unplaced(),
) -> tuple[Mean, Metrics]:
    """Return `next_token(hidden @ head.T, targets, real)`, computed `chunk` by `chunk`.

    Logits exist for `chunk` positions of each row at a time. Sums are float32 whatever the inputs'
    type, and so are the logits that they are computed from. The forward pass computes the gradient
    along with the logits, so that nothing is computed twice; the backward pass scales the gradient.

    Over devices: the head is gathered once and its gradient reduced once: from the gradients in all
    logits of a device where these are the smaller, so that no device has the head's whole gradient;
    else each shard of the rows adds up its own first. A split vocabulary stays split: the devices
    exchange the maximum logit, the sum and the target's logit of each token. A chunk takes every
    n-th position, so that split sequences stay split.

    Args:
        targets: the next tokens; one outside 0 .. v-1 is treated as by `next_token`.
        real: which targets count; hidden states of the others may be NaN.
        weights: how many times a target counts, of each row or of each target; None: once.
        chunk: positions of a row in a chunk.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        z_loss: this times the square of the log of the softmax's denominator is added to the value;
            the metrics then have both parts, `cross_entropy` and `z_loss`.
        logits: the type in which the product of hidden states and head is stored. bfloat16 halves
            the memory and the bytes that are read, and rounds each logit to 8 bits
            (docs/precision.md); PyTorch's autocast does so.

    Raises:
        LossError: if the chunk or the cap is not positive, the rows do not divide into the
            shards of `placement`, or the shapes do not match.
    """
    check_labels_shape(hidden, targets, real)
    _check(len(hidden), chunk, soft_cap, placement.rows)
    dtype = jnp.dtype(hidden.dtype)
    stored = _logits_dtype(logits, dtype)
    settings = _Settings(chunk, soft_cap, z_loss, placement, dtype, stored)
    targets = in_range(targets, head, 0).astype(jnp.int32)  # bytes number no larger vocabulary
    each = spread_weights(weights, real.shape)
    each = None if each is None else jnp.where(real, each, 0).astype(_wide(hidden.dtype))
    arrays = hidden, head.astype(hidden.dtype), targets, real, each

    def summed(*arrays: Any) -> tuple[Array, _Sums]:
        value, by_row = cast(tuple[Array, _Sums], _loss(settings, *arrays))
        return value, jax.tree.map(jnp.sum, jax.lax.stop_gradient(by_row))

    value, sums = placement.sums(summed, *arrays)
    mean = lambda total: Mean(total, weight)
    weight = real.sum(dtype=jnp.float32) if each is None else each.sum()
    metrics = {"accuracy": mean(sums.hits)}
    if z_loss:
        metrics |= {"cross_entropy": mean(sums.nats), "z_loss": mean(sums.squares)}
    return Mean(value, weight), metrics


def sum_over_chunks(
    metric: Callable[..., Mean],
    hidden: Float[Array, "b t d"],
    head: Float[Array, "v d"],
    targets: Integer[Array, "b t"],
    real: Bool[Array, "b t"],
    weights: Shaped[Array, "b t"] | None,
    *,
    chunk: int = 128,
    soft_cap: float | None = None,
) -> Mean:
    """Return `metric(logits, targets, real, weights)`, added up chunk by chunk.

    The arguments are those of `chunked_next_token`.
    """
    dtype = jnp.dtype(hidden.dtype)
    settings = _Settings(chunk, soft_cap, 0.0, Unplaced(), dtype, jnp.dtype(_wide(dtype)))

    def measure(slices: tuple[Any, ...]) -> Mean:
        x, targets, _, real, weights = slices
        logits = _product("btd,vd->btv", jnp.where(real[..., None], x, 0), head.astype(x.dtype))
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        return metric(logits, targets, real, weights)

    parts = jax.lax.map(measure, _slices(settings, hidden, head, targets, real, weights))
    return jax.tree.map(lambda x: x.sum(0), parts)


class _Settings(NamedTuple):
    chunk: int
    soft_cap: float | None
    z_loss: float
    placement: Placement
    dtype: np.dtype  # of the products
    stored: np.dtype  # of the logits

    def gather(self, head: Array) -> Array:
        """Gather the width of the head, once and not for each chunk; the vocabulary stays split.

        Called inside the custom derivative, so that the gradient of the head can stay split.
        """
        return self.placement.constrain(head, "vocab", None)

    @property
    def unit(self) -> float:
        """The factor of the slopes, by which a probability of 1e-5 keeps its digits in float16."""
        return 4096.0 if self.dtype == jnp.float16 else 1.0


class _Sums(NamedTuple):
    """Sums over the real tokens of each row, b."""

    nats: Array
    squares: Array
    hits: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings, hidden, head, targets, real, weights):
    head = settings.gather(head)

    def add(sums, slices):
        more, *_ = _chunk(settings, head, *slices)
        return jax.tree.map(jnp.add, sums, more), None

    slices = _slices(settings, hidden, head, targets, real, weights)
    sums, _ = jax.lax.scan(add, _zero_sums(hidden), slices)
    return _value(settings, sums), sums


def _forward(settings, hidden, head, targets, real, weights):
    (b, t, d), head = hidden.shape, settings.gather(head)
    slices = _slices(settings, hidden, head, targets, real, weights)
    tokens = b // settings.placement.rows * -(-t // settings.placement.times)
    small = tokens * settings.dtype.itemsize <= d * jnp.dtype(_wide(settings.dtype)).itemsize
    walk = _keep_slopes if small else _sum_by_shard
    sums, grad_x, grad_head = walk(settings, head, slices)
    grad_x = jnp.moveaxis(grad_x, 0, 2).reshape(b, -1, d)[:, :t]
    grad_head = settings.placement.constrain(grad_head, "vocab", "split")
    # Nothing needs the sum soon: without a barrier what it is made of lives through the layers'
    # backward pass.
    grad_x, grad_head = jax.lax.optimization_barrier((grad_x, grad_head))
    return (_value(settings, sums), sums), (grad_x, grad_head, weights)


def _keep_slopes(settings, head, slices):
    """Return the sums and both gradients; that of the head is one product, scattered at once."""

    def add(sums, chunk):
        more, x, slopes = _chunk(settings, head, *chunk)
        grad_x = _product("btv,vd->btd", slopes, head)
        return jax.tree.map(jnp.add, sums, more), (grad_x, x, slopes)

    sums, (grad_x, x, slopes) = jax.lax.scan(add, _zero_sums(slices[0][0]), slices)
    return sums, grad_x, _product("nbcv,nbcd->vd", slopes, x)


def _sum_by_shard(settings, head, slices):
    """Return the sums and both gradients; that of the head is summed on each device, then once."""
    placement, b = settings.placement, slices[0].shape[1]
    s, p = placement.rows, placement.times  # grad_head has a sum for each shard of rows and time
    by_shard = lambda x: x.reshape(s, b // s, p, -1, x.shape[-1])  # s b/s p c/p .
    constrain = lambda x: placement.constrain(x, "rows", "time", "vocab", None)

    def add(carry, chunk):
        sums, grad_head = carry
        more, x, slopes = _chunk(settings, head, *chunk)
        grad_x = _product("btv,vd->btd", slopes, head)
        update = _product("sbptv,sbptd->spvd", by_shard(slopes), by_shard(x))
        return (jax.tree.map(jnp.add, sums, more), constrain(grad_head + update)), grad_x

    zeros = constrain(jnp.zeros((s, p, *head.shape), _wide(settings.dtype)))
    (sums, grad_head), grad_x = jax.lax.scan(add, (_zero_sums(slices[0][0]), zeros), slices)
    return sums, grad_x, grad_head.sum((0, 1))


def _backward(settings, gradients, upstream):
    scale = upstream[0] / settings.unit  # the gradient of the sums is stopped
    *gradients, weights = gradients
    grad_x, grad_head = ((x * scale).astype(settings.dtype) for x in gradients)
    none = np.zeros(grad_x.shape[:2], jax.dtypes.float0)
    return grad_x, grad_head, none, none, jax.tree.map(jnp.zeros_like, weights)


_loss.defvjp(_forward, _backward)


def _chunk(settings, head, x, targets, own, real, weights):
    """Return the sums of a chunk, its hidden states, and the gradient in each logit."""
    x = jnp.where(real[..., None], x, 0)  # the others may be NaN
    stored = jnp.einsum("btd,vd->btv", x, head, preferred_element_type=settings.stored)
    stored = settings.placement.constrain(stored, "rows", "time", "vocab")
    logits = stored.astype(_wide(x.dtype))
    tanh = None
    if settings.soft_cap is not None:
        tanh = jnp.tanh(logits / settings.soft_cap)
        logits = settings.soft_cap * tanh
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    log_total = top + jnp.log(total)  # b t 1
    targets, own = targets[..., None], own[..., None]
    tokens = jnp.arange(len(head), dtype=targets.dtype)[None, None]
    pick = lambda x: jnp.where(tokens == own, x, 0).sum(-1, keepdims=True)
    # What needs the maximum, as `total` does, a GPU takes in the same reading; a CPU writes it out.
    at_target = jax.lax.platform_dependent(
        default=lambda: pick(logits), cuda=lambda: top + pick(logits - top)
    )
    # The first of the maxima, as argmax returns, which XLA:CPU computes one number at a time.
    likeliest = jnp.where(logits == top, tokens, len(head)).min(-1, keepdims=True)
    weighted = lambda x: x if weights is None else x * weights[..., None]
    by_row = lambda x: jnp.where(real, weighted(x)[..., 0], 0).sum(1)
    sums = _Sums(
        nats=by_row(log_total - at_target),
        squares=by_row(jnp.square(log_total)),
        hits=by_row((likeliest == targets).astype(logits.dtype)),
    )
    slopes = powers * ((1 + 2 * settings.z_loss * log_total) / total)
    slopes -= (tokens == own).astype(slopes.dtype)
    if tanh is not None:
        slopes *= 1 - jnp.square(tanh)
    slopes = jnp.where(real[..., None], settings.unit * weighted(slopes), 0)
    return sums, x, slopes.astype(settings.dtype)


def _value(settings, sums):
    return (sums.nats + settings.z_loss * sums.squares).sum()


def _zero_sums(hidden):
    return _Sums(*[jnp.zeros(len(hidden), _wide(hidden.dtype))] * 3)


def _slices(settings, hidden, head, targets, real, weights):
    """Cut arrays b t ... into chunks of every n-th position, n b c ...; pad with unreal tokens."""
    t = hidden.shape[1]
    chunks = -(-t // settings.chunk)
    size = -(-t // (chunks * settings.placement.times)) * settings.placement.times

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, chunks * size - t), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(len(x), size, chunks, *x.shape[2:]), 2, 0)

    own = targets.clip(0, len(head) - 1)
    return jax.tree.map(cut, (hidden, targets, own, real, weights))


def _product(dims, x, y):
    return jnp.einsum(dims, x, y, preferred_element_type=_wide(x.dtype))


def _wide(dtype):
    return jnp.float32 if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def _logits_dtype(logits, dtype):
    if logits == "float32":
        return _wide(dtype)
    if dtype == jnp.float16:
        raise LossError(
            "logits=bfloat16 with float16 hidden states would round a number of 11 bits to 8, and "
            "gain no range: the loss scale is made for float16. Give logits=float32, or compute "
            "in bfloat16 (precision.kind=bf16)."
        )
    return jnp.dtype(jnp.bfloat16)


def _check(rows, chunk, soft_cap, shards):
    if chunk < 1:
        raise LossError(
            f"a chunk of {chunk} positions is empty. Give at least chunk=1; 128 is usual."
        )
    if soft_cap is not None and not soft_cap > 0:
        raise LossError(
            f"a soft cap of {soft_cap} bounds the logits to nothing. Give a positive number "
            f"(Gemma 2 has 30), or soft_cap=None for no bound."
        )
    if rows % shards:
        raise LossError(
            f"the {rows} rows do not divide into the {shards} shards of the placement. "
            f"Nearest: {-(-rows // shards) * shards} rows, or leave `placement` out."
        )
