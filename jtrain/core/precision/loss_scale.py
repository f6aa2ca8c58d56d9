"""Loss scaling: a factor that keeps small gradients representable in float16."""

import dataclasses

import jax
import jax.numpy as jnp

from jtrain.core.types import Leaf, Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unscaled:
    """No loss scaling: float32 and bfloat16 need none."""

    def up(self, loss: Leaf) -> Leaf:
        """Return `loss`."""
        return loss

    def down(self, tree: Tree) -> Tree:
        """Return `tree`."""
        return tree

    def after(self, finite: Leaf, *, overflow: Leaf | None = None) -> "Unscaled":
        """Return the same."""
        del finite, overflow
        return self

    def metrics(self) -> dict[str, Leaf]:
        """Return no metrics."""
        return {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling: halved where a gradient overflows, doubled after `growth` good steps.

    A loss that is not finite is so at every factor, and leaves the scale unchanged.

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2.
    """

    factor: Leaf  # f32 scalar
    good: Leaf  # int32 scalar: finite steps since it changed
    growth: int = dataclasses.field(metadata={"static": True})
    minimum: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def start(cls, factor: float, *, growth: int, minimum: float) -> "LossScale":
        """Return the scale before the first step."""
        start = max(factor, minimum)
        return cls(factor=jnp.float32(start), good=jnp.int32(0), growth=growth, minimum=minimum)

    def up(self, loss: Leaf) -> Leaf:
        """Return `loss` times the factor: this product is differentiated."""
        return loss * self.factor

    def down(self, tree: Tree) -> Tree:
        """Divide each leaf by the factor, exactly where the factor is a power of two."""
        return jax.tree.map(lambda leaf: leaf / self.factor, tree)

    def after(self, finite: Leaf, *, overflow: Leaf | None = None) -> "LossScale":
        """Return the scale of the next step.

        Args:
            finite: whether the step was, its loss and its gradient.
            overflow: whether the gradient was not, and all that came before it was; by default
                whenever the step was not finite.
        """
        spilt: Leaf = jnp.logical_not(finite) if overflow is None else overflow
        good = jnp.where(spilt, 0, self.good + finite)
        doubled = 2 * self.factor
        grow = (good >= self.growth) & jnp.isfinite(doubled)
        halved = jnp.maximum(self.factor / 2, self.minimum)
        factor = jnp.where(grow, doubled, jnp.where(spilt, halved, self.factor))
        return dataclasses.replace(self, factor=factor, good=jnp.where(grow, 0, good))

    def metrics(self) -> dict[str, Leaf]:
        """Return the factor as the metric `loss_scale`."""
        return {"loss_scale": self.factor}
