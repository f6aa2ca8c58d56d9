"""Quasi-Newton steps with a line search, for losses of a whole data set."""

from collections.abc import Mapping
from typing import Any, Literal

import optax
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.core.types import Params
from jtrain.errors import ConfigError
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import LearningRate


@configclass
class LBFGS(OptimizerConfig):
    """Liu & Nocedal 1989, https://doi.org/10.1007/BF01589116, with optax's zoom line search.

    A step evaluates loss and gradient of its batch several times. It is for full batches: the
    differences of gradients of different rows are no curvature.
    """

    kind: Literal["lbfgs"] = "lbfgs"
    lr: float = Field(default=1.0, gt=0)
    """Length of the direction that the line search starts from; 1 is Newton's step."""
    memory: int = Field(default=10, ge=1)
    """Steps that the curvature is estimated from; two copies of the parameters each."""
    searches: int = Field(default=20, ge=1)
    """Evaluations of loss and gradient along a direction, at most."""

    @model_validator(mode="after")
    def _follows_the_loss(self) -> "LBFGS":
        """A line search along anything but the gradient of the loss it reads goes astray."""
        for name in ("clip", "clip_value", "weight_decay"):
            if getattr(self, name):
                raise ValueError(
                    f"lbfgs searches along the gradient of the loss itself, which optimizer.{name}="
                    f"{getattr(self, name):g} would change: set optimizer.{name}=0"
                    + (" and add the decay to the loss" if name == "weight_decay" else "")
                )
        for i, group in enumerate(self.groups):
            if group.weight_decay or group.lr != 1:
                raise ValueError(
                    f"lbfgs takes one step for all leaves, and optimizer.groups[{i}] has an lr or "
                    "a weight_decay of its own: leave it nothing but freeze"
                )
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The gradient times the estimate of the inverse Hessian."""
        del decay
        return optax.scale_by_lbfgs(self.memory)

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """The direction, and how far the line search goes along it."""
        del rate
        search = optax.scale_by_zoom_linesearch(self.searches, initial_guess_strategy="one")
        whole = optax.chain(rule, scale, search)

        def update(updates: Params, state: Any, params: Params | None = None, **known: Any):
            _check_known(known)
            return whole.update(updates, state, params, **known)

        return optax.GradientTransformationExtraArgs(whole.init, update)


def _check_known(known: Mapping[str, Any]) -> None:
    wanted = ("value", "grad", "value_fn")
    missing = [name for name in wanted if known.get(name) is None]
    if missing:
        raise ConfigError(
            f"optimizer.kind=lbfgs searches along its direction and was given no "
            f"{', no '.join(missing)}: call update(grads, state, params, value=loss, grad=grads, "
            f"value_fn=loss_of_params), as jt.make_step does, or take optimizer.kind=adamw."
        )
