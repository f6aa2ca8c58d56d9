"""A mixture of experts in the place of a block's MLP."""

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
from jtrain.models.experts.capacity import within_capacity
from jtrain.models.experts.dropless import dropless, weighed
from jtrain.models.experts.experts import Capacity, NoExperts
from jtrain.models.layers.feed_forward import Activation, bend
from jtrain.models.layers.key_sequence import KeySequence
from jtrain.models.transformer import Transformer

UP, DOWN = ("experts", "width", "hidden"), ("experts", "hidden", "width")


class MixtureOfExperts(nnx.Module):
    """A router, which sends each token to some of the experts, and their MLPs side by side."""

    def __init__(
        self, values: Transformer, place: Placement, rngs: KeySequence, *, std: float, onto: float
    ):
        """`std` is that of the router and of the kernels into the experts, `onto` of those out."""
        assert not isinstance(values.experts, NoExperts), "such a block has an MLP"
        self.experts, self.place = values.experts, place
        self.activation: Activation = values.activation
        count, width, hidden = values.experts.count, values.width, values.size_of_hidden
        normal = lambda std, shape, dims: nnx.Param(
            std * jax.random.normal(rngs.params(), shape), dims=dims
        )
        self.router = normal(std, (width, count), ("width", "choices"))
        up = lambda: normal(std, (count, width, hidden), UP)
        self.gate = up() if values.activation == "swiglu" else None
        self.up = up()
        self.down = normal(onto, (count, hidden, width), DOWN)

    def __call__(
        self, x: Float[Array, "b t d"], whole: bool = True, order: np.ndarray | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t e"]]:
        """What the experts give together, and the router's logits, in at least float32.

        `whole`: whether these are whole rows. A part of one does not know who was there before,
        and every token gets a place. `order`: which positions they are, where they are not in
        their own order.
        """
        how = self.experts
        router = at_least_f32(self.router[...])
        logits = jnp.matmul(at_least_f32(x), router, precision="highest")  # a TPU would narrow it
        chosen, weights = self._choose(logits)
        kernels = [kernel[...] for kernel in (self.up, self.down, self.gate) if kernel is not None]
        if isinstance(how, Capacity) and whole:
            product = lambda x, kernel: jnp.einsum("becx,exy->becy", x, kernel)
            feed = functools.partial(_feed, self.activation, self._wide)
            if order is not None:  # earlier tokens take places first
                back = np.argsort(order)
                x, chosen = (
                    self.place.constrain(x, "batch", None, "width")[:, back],
                    chosen[:, back],
                )
            mixed = within_capacity(
                lambda inputs: feed(product, inputs, *kernels),
                x,
                chosen,
                experts=how.count,
                places=how.places(x.shape[1]),
                place=self.place,
            )
            mixed = mixed if order is None else mixed[:, order]
            return weighed(mixed, weights), logits
        feed = functools.partial(_feed, self.activation, _named)
        dims = (UP, DOWN, UP)[: len(kernels)]
        mix = functools.partial(dropless, feed)
        return self.place.experts(mix, x, chosen, weights, kernels, dims), logits

    def _choose(
        self, logits: Float[Array, "b t e"]
    ) -> tuple[Int[Array, "b t k"], Float[Array, "b t k"]]:
        """The experts of each token, and how much each weighs."""
        # Sorted, for the compiler splits no lax.top_k: it would gather the logits of all rows.
        order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
        chosen = order[..., : self.experts.top_k]
        picks = jax.nn.one_hot(chosen, self.experts.count, dtype=bool)  # b t k e
        highest = jnp.where(picks, logits[..., None, :], 0).sum(-1)
        if self.experts.weights == "chosen":
            return chosen, jax.nn.softmax(highest, -1)
        return chosen, jnp.exp(highest - jax.nn.logsumexp(logits, -1, keepdims=True))

    def _wide(self, x: Float[Array, "b e c f"]) -> Float[Array, "b e c f"]:
        return _named(self.place.constrain(x, "batch", "experts", None, "hidden"))


def _feed(
    activation: Activation,
    wide: Callable[[Array], Array],
    product: Callable[[Array, Array], Array],
    x: Float[Array, "*b d"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    gate: Float[Array, "e d f"] | None = None,
) -> Float[Array, "*b d"]:
    """The MLP of each expert, of the tokens that are its own by `product`."""
    bent = None if gate is None else wide(product(x, gate))
    return product(bend(activation, wide(product(x, up)), bent), down)


def _named(x: Float[Array, "*b f"]) -> Float[Array, "*b f"]:
    return checkpoint_name(x, "hidden")
