"""AdamW that needs no falling learning rate, as it averages instead."""

from typing import Literal

import optax
import optax.contrib
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.optim.evaluation import WithEvalParams
from jtrain.optim.moments import Moments
from jtrain.optim.schedules import LearningRate


@configclass
class ScheduleFree(Moments):
    """Defazio et al., https://arxiv.org/abs/2405.15682, over AdamW without momentum.

    Gradients are taken between the point that moves and the mean of where it was, and the mean is
    what evaluation and samples see. Meant for a constant rate after a warmup; b1 is the share of
    the mean in that between.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    weight_decay: float = Field(default=0.01, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""
    b1: float = Field(default=0.9, gt=0, lt=1)
    """Share of the mean in the parameters of which the gradient is taken."""

    @model_validator(mode="after")
    def _one_mean(self) -> "ScheduleFree":
        if self.ema:
            raise ValueError(
                f"schedule_free is judged by a mean of its own, so that optimizer.ema={self.ema:g} "
                "would have no use: set optimizer.ema=0, or take optimizer.kind=adamw"
            )
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """The gradient over its root mean square, and the decay beside it."""
        by_rms = optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True)
        return optax.chain(by_rms, decay)

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """The updates of the parameters between, with the mean to judge by."""
        moves = optax.chain(rule, scale)
        # Where it weighs the rate of a step optax counts from 1, and rates count from 0.
        whole = optax.contrib.schedule_free(moves, lambda count: rate(count - 1), self.b1)
        return WithEvalParams(*whole, optax.contrib.schedule_free_eval_params)
