"""Guard against bad steps: the loop ends at a step that is not finite, or a spike."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtrain.config.guard import RollbackPolicy, StopPolicy
from jtrain.core.loop import Hook, Rollback, Stop
from jtrain.core.types import Metrics
from jtrain.train.hooks.bad_step_log import BadStep, describe_skipped_step


@dataclasses.dataclass
class RunningMean:
    """Means over roughly the last `memory` steps: weights decay by `1 - 1/memory` a step.

    Only finite numbers are included. The weights add up to 1 from the first step on.
    """

    memory: int
    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0

    def absorb(self, loss: float, grad_norm: float) -> None:
        """Update the means by a step; a step that is not finite changes nothing."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.steps += 1
            share = max(1 / self.steps, 1 / self.memory)
            self.loss += share * (loss - self.loss)
            self.grad_norm += share * (grad_norm - self.grad_norm)

    def above(self, name: str, value: float, factor: float) -> bool:
        """Return whether a loss or norm is more than `factor` times its mean; 0 is no bound.

        With a mean below zero: whether it exceeds the mean by `factor - 1` times its size.
        """
        mean = getattr(self, name)
        known = factor > 0 and self.steps >= self.memory
        return known and value - mean > (factor - 1) * abs(mean)

    def state(self) -> dict[str, Any]:
        """Return JSON from which `restore` recovers the same means, to the bit."""
        state = dataclasses.asdict(self)
        del state["memory"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the means to a saved state; an empty one restarts them."""
        self.steps = state.get("steps", 0)
        self.loss, self.grad_norm = state.get("loss", 0.0), state.get("grad_norm", 0.0)


class BadStepGuard(Hook):
    """Hook that returns a `Rollback` or a `Stop` at a bad step.

    The numbers of a step arrive some calls late, but all numbers up to a checkpoint arrive before
    the checkpoint is written, so no checkpoint is later than a bad step. In several processes the
    numbers are those of the whole batch and equal to the bit, so all processes decide alike.

    Args:
        policy: of the config.
        minimum: smallest loss scale, if there is one. Above it an overflow of the gradient is how
            the scale adapts, and is not bad.
        helps: `(step, state) -> bool`, with a state that is not donated yet: whether the gradient
            of that step's batch is finite at the smallest loss scale. If not, no scale helps.
        earlier: the bad steps that the run was rolled back for before.
        known: the result of `RunningMean.state` in the checkpoint.
        skipped: steps that were skipped before the first step of this run (`state.skipped`).
    """

    def __init__(
        self,
        policy: RollbackPolicy | StopPolicy,
        *,
        minimum: float = 0.0,
        helps: Callable[[int, Any], bool] = lambda step, state: True,
        earlier: Sequence[int] = (),
        known: Mapping[str, Any] = {},
        skipped: int = 0,
    ):
        self._policy, self._minimum, self._earlier = policy, minimum, earlier
        self._helps, self._state = helps, None
        self.means = RunningMean(policy.spike.memory)
        """Running means over the good steps."""
        self.means.restore(known)
        self._skipped = skipped
        self.bad: BadStep | None = None
        """The first bad step; no later state is worth saving."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Check a step; a bad one ends the loop."""
        loss, grad_norm, update_norm = (
            numbers[name] for name in ("loss", "grad_norm", "update_norm")
        )
        before, self._skipped = self._skipped, round(numbers.get("skipped", self._skipped))
        skipped = self._skipped > before or not math.isfinite(loss + grad_norm)
        overflow = math.isfinite(loss) and not math.isfinite(grad_norm)
        scaled = skipped and overflow and numbers.get("loss_scale", 0.0) > self._minimum
        if self.bad or (scaled and self._helps(step, self._state)):
            return None
        what = self._describe(loss, grad_norm, update_norm)
        if skipped and math.isfinite(loss + grad_norm):
            what = describe_skipped_step(loss, grad_norm)
        if scaled:
            what += ", at the smallest loss scale too"
        if not what:
            self.means.absorb(loss, grad_norm)
            return None
        self.bad = BadStep(step, what, loss, grad_norm, update_norm)
        return self._respond(self.bad)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keep the newest state until it is donated; `on_numbers` is called before that."""
        self._state = state

    def _describe(self, loss: float, grad_norm: float, update_norm: float) -> str:
        """Return what is wrong with a step, in words; "" for a good step."""
        spike, means = self._policy.spike, self.means
        if not all(map(math.isfinite, (loss, grad_norm, update_norm))):
            update = f", update norm {update_norm:g}" if math.isfinite(grad_norm) else ""
            return f"is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}{update}"
        if means.above("loss", loss, spike.loss):
            return f"is a spike: loss {loss:.4g}, and the mean before it {means.loss:.4g}"
        if means.above("grad_norm", grad_norm, spike.grad_norm):
            return (
                f"is a spike: gradient norm {grad_norm:.4g}, and the mean before it "
                f"{means.grad_norm:.4g}"
            )
        return ""

    def _respond(self, bad: BadStep) -> Stop:
        policy, why = self._policy, f"step {bad.step} {bad.what}."
        if isinstance(policy, StopPolicy):
            return Stop(why, "failed")
        recent = [step for step in self._earlier if step > bad.step - policy.within]
        if len(recent) < policy.most:
            return Rollback(why, step=bad.step, back=policy.back, skip=policy.skip)
        steps = ", ".join(map(str, recent))
        return Stop(
            f"{why} The run was rolled back {len(recent)} times within {policy.within} steps (for "
            f"{steps or 'none'}), and guard.most is {policy.most}.",
            "failed",
        )
