"""The feed-forward part of a block: activations, and mixtures of experts.

Tokens are dispatched to their experts dropless, or with a fixed number of places each.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.losses.balance import top_experts
from jtrain.models.experts import Activation, Capacity, Dropless
from jtrain.models.layers.dropout import KeySequence
from jtrain.models.transformer import Transformer
from jtrain.parallel.explicit import gathered

SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the GELU of `x`, approximated by tanh as in GPT-2, computed in at least float32.

    The forward pass takes 1 + tanh(u) = 2 / (1 + exp(-2u)), the backward pass tanh(u) =
    1 - 2 / (1 + exp(2u)): as the two share no expression, the compiler cannot save one for the
    backward pass, and each block writes one array of the MLP's width less. Only reverse mode:
    `jax.jvp` and `jax.hessian` raise.

    Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
    """
    wide = at_least_f32(x)
    return (wide * jax.nn.sigmoid(2 * SLOPE * (wide + CUBE * wide**3))).astype(x.dtype)


def _gelu_forward(x):
    return gelu(x), x


def _gelu_backward(x, grad):
    wide = at_least_f32(x)
    square = jnp.square(wide)
    # An exponential takes a GPU fewer instructions than a tanh.
    tanh = 1 - 2 / (1 + jnp.exp(2 * SLOPE * wide * (1 + CUBE * square)))
    inner = SLOPE * (1 + 3 * CUBE * square)
    slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - jnp.square(tanh)) * inner
    return ((at_least_f32(grad) * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


GATED = ("swiglu", "geglu")  # their MLPs have a third kernel


def activate(
    activation: Activation, wide: Float[Array, "*b f"], gate: Float[Array, "*b f"] | None
) -> Float[Array, "*b f"]:
    """Return GELU of `wide`, by tanh or exact, or `wide` times SiLU or GELU (tanh) of `gate`.

    The computation is in at least float32.

    Sources: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415; Shazeer 2020,
    https://arxiv.org/abs/2002.05202.
    """
    if activation == "gelu":
        return gelu(wide)
    if activation == "gelu_exact":
        return jax.nn.gelu(at_least_f32(wide), approximate=False).astype(wide.dtype)
    assert gate is not None, f"{activation} has a gate"
    if activation == "geglu":
        return gelu(gate) * wide
    return (jax.nn.silu(at_least_f32(gate)) * at_least_f32(wide)).astype(wide.dtype)


UP, DOWN = ("experts", "width", "hidden"), ("experts", "hidden", "width")


class MixtureOfExperts(nnx.Module):
    """A router, which sends each token to some of the experts, and the experts' MLPs.

    Args:
        stds: of the router and of the experts' first kernels; of their last kernels.
    """

    def __init__(
        self,
        config: Transformer,
        experts: Dropless | Capacity,
        placement: Placement,
        rngs: nnx.Rngs | KeySequence,
        stds: tuple[float, float],
    ):
        std, std_out = stds
        self.experts, self.placement = experts, placement
        self.activation: Activation = config.activation
        count, width, hidden = experts.count, config.width, config.size_of_hidden

        def normal(std: float, shape: tuple[int, ...], dims: tuple[str, ...]) -> nnx.Param:
            return nnx.Param(std * jax.random.normal(rngs.params(), shape), dims=dims)

        self.router = normal(std, (width, count), ("width", "choices"))
        self.gate = normal(std, (count, width, hidden), UP) if self.activation in GATED else None
        self.up = normal(std, (count, width, hidden), UP)
        self.down = normal(std_out, (count, hidden, width), DOWN)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        complete_rows: bool = True,
        order: np.ndarray | None = None,
        bias: Float[Array, "e"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t e"]]:
        """Return the weighted sum of the experts, and the router's logits in at least float32.

        Args:
            complete_rows: False for tokens that continue cached ones: which places the cached
                tokens took is not known, and every token gets a place.
            order: the position of each token of `x`, where they are permuted.
            bias: of each expert, added to its score where experts are chosen.
        """
        experts = self.experts
        router = at_least_f32(gathered(self.router[...]))
        logits = jnp.matmul(at_least_f32(x), router, precision="highest")  # a TPU would narrow it
        chosen, weights = self._choose(logits, bias)
        kernels = [kernel[...] for kernel in (self.up, self.down, self.gate) if kernel is not None]
        if isinstance(experts, Capacity) and complete_rows:
            product = lambda x, kernel: jnp.einsum("becx,exy->becy", x, gathered(kernel))
            feed = functools.partial(_feed, self.activation, self._wide)
            if order is not None:  # earlier tokens take places first
                inverse = np.argsort(order)
                x = self.placement.constrain(x, "batch", None, "width")[:, inverse]
                chosen = chosen[:, inverse]
            mixed = within_capacity(
                lambda inputs: feed(product, inputs, *kernels),
                x,
                chosen,
                experts=experts.count,
                places=experts.places(x.shape[1]),
                placement=self.placement,
            )
            mixed = mixed if order is None else mixed[:, order]
            return sum_weighted(mixed, weights), logits
        feed = functools.partial(_feed, self.activation, _named)
        dims = (UP, DOWN, UP)[: len(kernels)]
        mix = functools.partial(dropless, feed)
        return self.placement.experts(mix, x, chosen, weights, kernels, dims), logits

    def _choose(
        self, logits: Float[Array, "b t e"], bias: Float[Array, "e"] | None
    ) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"]]:
        """Return the experts of each token, and their weights."""
        ranked = logits if bias is None else self.experts.scores(logits) + bias[None, None]
        chosen = top_experts(ranked, self.experts.top_k)
        one_hot = jax.nn.one_hot(chosen, self.experts.count, dtype=bool)  # b t k e
        highest = jnp.where(one_hot, logits[..., None, :], 0).sum(-1)
        if self.experts.weights == "chosen":
            return chosen, jax.nn.softmax(highest, -1)
        if self.experts.weights == "sigmoid":
            return chosen, jax.nn.softmax(jax.nn.log_sigmoid(highest), -1)
        return chosen, jnp.exp(highest - jax.nn.logsumexp(logits, -1, keepdims=True))

    def _wide(self, x: Float[Array, "b e c f"]) -> Float[Array, "b e c f"]:
        return _named(self.placement.constrain(x, "batch", "experts", None, "hidden"))


def _feed(
    activation: Activation,
    wide: Callable[[Array], Array],
    product: Callable[[Array, Array], Array],
    x: Float[Array, "*b d"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    gate: Float[Array, "e d f"] | None = None,
) -> Float[Array, "*b d"]:
    """Apply the MLP of each expert to its tokens; `product` pairs tokens with kernels."""
    gated = None if gate is None else wide(product(x, gate))
    return product(activate(activation, wide(product(x, up)), gated), down)


def _named(x: Float[Array, "*b f"]) -> Float[Array, "*b f"]:
    return checkpoint_name(x, "hidden")


class ExpertSlots(NamedTuple):
    """Slot of each choice, and choice of each slot."""

    of_choice: Int[Array, "n k"]  # m where the choice has none
    choice: Int[Array, "m"]  # n k where the slot has none


@jax.custom_vjp
def to_slots(x: Float[Array, "n d"], slots: ExpertSlots) -> Float[Array, "m d"]:
    """Return the token in each slot; zeros in an empty slot."""
    return _gather(x, slots.choice // slots.of_choice.shape[1])


@jax.custom_vjp
def from_slots(y: Float[Array, "m d"], slots: ExpertSlots) -> Float[Array, "n k d"]:
    """Return the value in the slot of each choice; zeros for a choice without a slot."""
    return _gather(y, slots.of_choice)


def _gather(x, at):
    return x.at[at].get(mode="fill", fill_value=0)


def _to_slots_back(slots, grad):
    return _gather(grad, slots.of_choice).sum(1), _no_gradient(slots)


def _from_slots_back(slots, grad):
    return _gather(grad.reshape(-1, grad.shape[-1]), slots.choice), _no_gradient(slots)


def _no_gradient(slots):
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), slots)


to_slots.defvjp(lambda x, slots: (to_slots(x, slots), slots), _to_slots_back)
from_slots.defvjp(lambda y, slots: (from_slots(y, slots), slots), _from_slots_back)


class ExpertQueues(NamedTuple):
    """The choices of some tokens, sorted by expert, then by token."""

    order: Int[Array, "n*k"]  # the choices, sorted
    rank: Int[Array, "n k"]  # index of each choice in `order`
    starts: Int[Array, "e+1"]  # first index of each expert; last, of choices without an expert


def queues(chosen: Int[Array, "n k"], experts: int) -> ExpertQueues:
    """Sort the choices by expert; choices outside 0 .. experts - 1 come last."""
    known = (chosen >= 0) & (chosen < experts)
    flat = jnp.where(known, chosen, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rank = jnp.argsort(order).reshape(chosen.shape)
    before = flat[:, None] < jnp.arange(experts + 1, dtype=flat.dtype)[None]
    return ExpertQueues(order, rank, before.sum(0, dtype=jnp.int32))


def dropless(
    feed: Callable[..., Array],
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t k"],
    weights: Float[Array, "b t k"],
    *kernels: Float[Array, "e _ _"],
) -> Float[Array, "b t d"]:
    """Return the weighted sum of the outputs of each token's experts.

    A choice outside 0 .. e - 1 adds nothing: another device has the kernels of that expert.

    Args:
        feed: the MLP of an expert, `feed(product, tokens, *kernels)`.
    """
    experts, tokens, k = len(kernels[0]), x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    sort = queues(chosen.reshape(-1, k), experts)
    # The experts of a token differ, so at most `experts` of its choices are on this device.
    rows = len(tokens) * min(k, experts)
    at, end = jnp.arange(rows, dtype=chosen.dtype), sort.starts[-1]
    slots = ExpertSlots(
        of_choice=jnp.where(sort.rank < end, sort.rank, rows),
        choice=jnp.where(at < end, sort.order[:rows], sort.order.size),
    )
    sizes = jnp.diff(sort.starts)
    product = lambda rows, kernel: jax.lax.ragged_dot(rows, kernel, sizes)
    mixed = from_slots(feed(product, to_slots(tokens, slots), *kernels), slots)  # n k d
    return sum_weighted(mixed.reshape(*chosen.shape, -1), weights)


def sum_weighted(
    mixed: Float[Array, "*b k d"], weights: Float[Array, "*b k"]
) -> Float[Array, "*b d"]:
    """Return the weighted sum over the experts of a token, summed in at least float32."""
    return (at_least_f32(mixed) * weights[..., None]).sum(-2).astype(mixed.dtype)


def within_capacity(
    feed: Callable[[Array], Array],
    x: Float[Array, "b t d"],
    chosen: Int[Array, "b t k"],
    *,
    experts: int,
    places: int,
    placement: Placement,
) -> Float[Array, "b t k d"]:
    """Return the output of each expert that a token chose; zeros where no place was left.

    Args:
        feed: the experts' MLPs, b e c d -> b e c d, with c places.
        places: places of a row at each expert; the earlier tokens of the row take them first.
    """
    slots = jax.vmap(lambda row: _slots(row, experts, places))(chosen)
    # First rows are split over the devices of their axes, then experts over theirs: the change is
    # an all-to-all.
    by_row = lambda y: placement.constrain(y, "batch", None, None, "width")
    by_expert = lambda y: placement.constrain(y, "batch", "experts", None, "width")
    x = placement.constrain(x, "batch", None, "width")  # a row's tokens compete with one another
    inputs = jax.vmap(to_slots)(x, slots)
    inputs = by_expert(by_row(inputs.reshape(len(x), experts, places, -1)))
    outputs = by_row(by_expert(feed(inputs)))
    return jax.vmap(from_slots)(outputs.reshape(len(x), experts * places, -1), slots)


def _slots(chosen: Int[Array, "t k"], experts: int, places: int) -> ExpertSlots:
    """Return slots e c that hold the first `places` choices of each expert."""
    sort, none = queues(chosen, experts), experts * places
    place = sort.rank - sort.starts[chosen]
    of_choice = jnp.where(place < places, chosen * places + place, none)
    at = sort.starts[:-1, None] + jnp.arange(places, dtype=chosen.dtype)[None]  # e c
    taken: Bool[Array, "e c"] = at < sort.starts[1:, None]
    choice = jnp.where(taken, sort.order.at[at].get(mode="clip"), chosen.size)
    return ExpertSlots(of_choice, choice.reshape(-1))
