"""Schedule-free AdamW, which averages instead of lowering the learning rate."""

from typing import Literal

import optax
import optax.contrib
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.optim.adam import Moments
from jtrain.optim.evaluation import WithEvalParams
from jtrain.optim.schedules import LearningRate
from jtrain.optim.transformations import by_parts


@configclass
class ScheduleFree(Moments):
    """Defazio et al., https://arxiv.org/abs/2405.15682, over AdamW without momentum.

    Gradients are taken at a point between the iterate and the mean of all iterates; evaluation and
    samples use the mean. Meant for a constant rate after a warmup; b1 is the share of the mean in
    that point.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""
    b1: float = Field(default=0.9, gt=0, lt=1)
    """Share of the mean in the parameters at which the gradient is taken."""

    @model_validator(mode="after")
    def _check_ema(self) -> "ScheduleFree":
        if self.ema:
            raise ValueError(
                f"schedule_free is evaluated on its own mean, so that optimizer.ema={self.ema:g} "
                "would have no effect: set optimizer.ema=0, or take optimizer.kind=adamw"
            )
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Divide the gradient by its root mean square and add the decay."""
        by_rms = optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True)
        return optax.chain(by_rms, decay)

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """Return the updates of the point between, with the mean for evaluation."""
        iterate = by_parts(optax.chain(rule, scale))
        # optax counts the steps of the rate from 1, and our rates count from 0.
        chained = optax.contrib.schedule_free(iterate, lambda count: rate(count - 1), self.b1)
        return WithEvalParams(*chained, optax.contrib.schedule_free_eval_params)
