"""Mixture of experts: a router and the experts' MLPs, instead of a block's MLP."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain.core.placement import Placement
from jtrain.core.pytree import at_least_f32
from jtrain.models.experts.dispatch import dropless, sum_weighted, within_capacity
from jtrain.models.experts.experts import Capacity, Dropless
from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.feed_forward import GATED, Activation, bend

UP, DOWN = ("experts", "width", "hidden"), ("experts", "hidden", "width")


class MixtureOfExperts(nnx.Module):
    """A router, which sends each token to some of the experts, and the experts' MLPs.

    Args:
        std: of the router and of the experts' first kernels.
        std_out: of the experts' last kernels.
    """

    def __init__(
        self,
        *,
        experts: Dropless | Capacity,
        width: int,
        hidden: int,
        activation: Activation,
        std: float,
        std_out: float,
        placement: Placement,
        rngs: KeySequence,
    ):
        self.experts, self.placement = experts, placement
        self.activation: Activation = activation
        count = experts.count

        def normal(std: float, shape: tuple[int, ...], dims: tuple[str, ...]) -> nnx.Param:
            return nnx.Param(std * jax.random.normal(rngs.params(), shape), dims=dims)

        self.router = normal(std, (width, count), ("width", "choices"))
        self.gate = normal(std, (count, width, hidden), UP) if activation in GATED else None
        self.up = normal(std, (count, width, hidden), UP)
        self.down = normal(std_out, (count, hidden, width), DOWN)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        complete_rows: bool = True,
        order: np.ndarray | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t e"]]:
        """Return the weighted sum of the experts, and the router's logits in at least float32.

        Args:
            x: the tokens.
            complete_rows: False for tokens that continue cached ones: which places the cached
                tokens took is not known, and every token gets a place.
            order: the position of each token of `x`, where they are permuted.
        """
        experts = self.experts
        router = at_least_f32(self.router[...])
        logits = jnp.matmul(at_least_f32(x), router, precision="highest")  # a TPU would narrow it
        chosen, weights = self._choose(logits)
        kernels = [kernel[...] for kernel in (self.up, self.down, self.gate) if kernel is not None]
        if isinstance(experts, Capacity) and complete_rows:
            product = lambda x, kernel: jnp.einsum("becx,exy->becy", x, kernel)
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
        self, logits: Float[Array, "b t e"]
    ) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"]]:
        """Return the experts of each token, and their weights."""
        # A sort: the compiler cannot split lax.top_k, and would gather the logits of all rows.
        order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
        chosen = order[..., : self.experts.top_k]
        one_hot = jax.nn.one_hot(chosen, self.experts.count, dtype=bool)  # b t k e
        highest = jnp.where(one_hot, logits[..., None, :], 0).sum(-1)
        if self.experts.weights == "chosen":
            return chosen, jax.nn.softmax(highest, -1)
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
    return product(bend(activation, wide(product(x, up)), gated), down)


def _named(x: Float[Array, "*b f"]) -> Float[Array, "*b f"]:
    return checkpoint_name(x, "hidden")
