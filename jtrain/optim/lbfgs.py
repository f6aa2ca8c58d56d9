"""L-BFGS: quasi-Newton steps with a line search, for full batches."""

from typing import Literal

import optax
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import LearningRate


@configclass
class LBFGS(OptimizerConfig):
    """Liu & Nocedal 1989, https://doi.org/10.1007/BF01589116, with optax's zoom line search.

    A step evaluates loss and gradient of its batch several times. Batches must be full: gradients
    of different rows differ by more than curvature.
    """

    kind: Literal["lbfgs"] = "lbfgs"
    lr: float = Field(default=1.0, gt=0)
    """First length along the direction in the line search; 1 is Newton's step."""
    memory: int = Field(default=10, ge=1)
    """Steps from which the curvature is estimated; each stores two copies of the parameters."""
    searches: int = Field(default=20, ge=1)
    """Most evaluations of loss and gradient along a direction."""

    @model_validator(mode="after")
    def _check_gradient(self) -> "LBFGS":
        """Raise for values that change the gradient: the line search needs that of the loss."""
        for name in ("clip", "clip_value", "weight_decay"):
            if getattr(self, name):
                raise ValueError(
                    f"lbfgs searches along the gradient of the loss itself, which optimizer.{name}="
                    f"{getattr(self, name):g} would change: set optimizer.{name}=0"
                    + (" and add the decay to the loss" if name == "weight_decay" else "")
                )
        for i, group in enumerate(self.groups):
            if group.weight_decay or group.lr_factor != 1:
                raise ValueError(
                    f"lbfgs takes one step for all leaves, and optimizer.groups[{i}] has an "
                    "lr_factor or a weight_decay of its own: set only freeze"
                )
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Multiply the gradient by the estimate of the inverse Hessian."""
        del decay
        return optax.scale_by_lbfgs(self.memory)

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """Return the direction scaled by the line search."""
        del rate
        search = optax.scale_by_zoom_linesearch(self.searches, initial_guess_strategy="one")
        return optax.chain(rule, scale, search)
