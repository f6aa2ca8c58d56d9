"""Guards: what is done about bad steps, by each policy of the config's `guard`.

A guard has `judge` and `state`, as `jtrain.config.GuardPolicy.make_judge` describes them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jtrain.config.sections import RollbackPolicy, SkipPolicy, StopPolicy
from jtrain.core.loop import Rollback, Stop
from jtrain.io.log import LOG
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStep, BadStepLog

KEPT = "The parameters are those of the last finite step."
FIND = "To find the operation, the leaf and the rows, add --find-nan to the same command."
SHARE = 0.1  # of all steps, that may be skipped for values of the data that are not finite
MIN_STEPS, MAX_NAMED = 5, 3  # such steps before the run may end; rows that are named


class StepNumbers(NamedTuple):
    """Numbers of a step that decide whether it is bad."""

    step: int
    loss: float
    grad_norm: float
    update_norm: float
    skipped: float
    """Steps that were skipped so far, with this one."""
    loss_scale: float
    """Loss scale of the step; NaN without loss scaling."""

    @property
    def overflows(self) -> bool:
        """Whether the gradient alone is not finite."""
        return math.isfinite(self.loss) and not math.isfinite(self.grad_norm)

    def describe(self) -> str:
        """Return a description of a step that is not finite."""
        if math.isfinite(self.loss + self.grad_norm + self.update_norm):
            return f"makes extra non-finite: loss {self.loss:.4g}"
        numbers = f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"
        if math.isfinite(self.loss + self.grad_norm):
            numbers += f", update norm {self.update_norm:g}"
        return f"is not finite: {numbers}"


class SkipGuard:
    """Response that counts skipped steps, names their data, and ends a run of too many."""

    def __init__(
        self,
        config: RunConfig,
        policy: SkipPolicy,
        log: BadStepLog,
        start: int,
        known: Mapping[str, Any],
    ):
        self._log = log
        self._window = min(policy.window, config.steps)
        self._log_every, self._logged_at, self._unlogged = config.log.every, start, 0
        self._last: int = known.get("last", 0)  # skipped step
        self._in_a_row: int = known.get("in_a_row", 0)
        self._data_steps: int = known.get("data_steps", 0)
        self._named = dict.fromkeys(known.get("named", ()))
        self._cause: str = known.get("cause", "")

    def judge(self, numbers: StepNumbers, was_skipped: bool) -> Stop | None:
        """Judge a step; a `Stop` ends the run, or rolls it back."""
        if not was_skipped:
            return None
        step = numbers.step
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last, self._unlogged = step, self._unlogged + 1
        bad = BadStep(step, numbers.describe(), numbers.loss, numbers.grad_norm)
        self._log.append(bad, "skipped")
        self._name_data(step)
        why = self._why_overflow(numbers) or self._why_none(bad)
        return Stop(why, "failed") if why else None

    def end_of(self, step: int) -> Stop | None:
        """Return a stop if values of the data that are not finite cost too many of the steps."""
        if self._unlogged and step - self._logged_at >= self._log_every:
            self.warn(step)
        if self._data_steps < max(MIN_STEPS, SHARE * step):
            return None
        return Stop(
            f"{self._data_steps} of {step} steps were skipped because the data is not finite: "
            f"{', '.join(self._named)}. {self._advice()}",
            "failed",
        )

    def warn(self, step: int) -> None:
        """Log how many steps were skipped since the last warning."""
        steps, skipped = step - self._logged_at, self._unlogged
        if skipped:
            advice = self._cause or "if this continues, lower optimizer.lr"
            rest = "The others were taken; " if skipped < steps else ""
            words = f"{rest}{advice}" if rest else f"{advice[0].upper()}{advice[1:]}"
            LOG.warning(
                f"steps {self._logged_at + 1} to {step}: {skipped} of {steps} skipped, loss or "
                f"gradient was not finite. {words}."
            )
        self._logged_at, self._unlogged = step, 0

    def state(self) -> dict[str, Any]:
        """Return JSON for a checkpoint, from which another instance resumes."""
        return {
            "last": self._last,
            "in_a_row": self._in_a_row,
            "data_steps": self._data_steps,
            "named": list(self._named),
            "cause": self._cause,
        }

    def _name_data(self, step: int) -> None:
        self._cause, found = "", self._log.find_nonfinite(step)
        if not found:
            return
        value, row = found
        where = f"row {value.row} of the batch of step {step}" if row is None else f"row {row}"
        self._cause = f"{where} of `{value.array}` has {value}"
        self._data_steps += 1
        if self._cause not in self._named and len(self._named) < MAX_NAMED:
            self._named[self._cause] = None
            LOG.warning(f"step {step} was skipped: {self._cause}. {self._advice()}")

    def _advice(self) -> str:
        array = self._cause.partition("`")[2].partition("`")[0]
        return f"Remove such rows, or fill them: {array} = np.nan_to_num({array})."

    def _why_overflow(self, numbers: StepNumbers) -> str:
        if not numbers.overflows or math.isnan(numbers.loss_scale):
            return ""
        return (
            f"step {numbers.step} overflowed float16 at the smallest loss scale, "
            f"precision.minimum={numbers.loss_scale:g}. {KEPT} Check the data for NaN or infinity, "
            f"set precision.kind=bf16, which has the range of float32, or lower optimizer.lr. "
            f"{FIND}"
        )

    def _why_none(self, bad: BadStep) -> str:
        if self._in_a_row < self._window:
            return ""
        return (
            f"no step from {bad.step - self._window + 1} to {bad.step} was finite: loss "
            f"{bad.loss:.4g}, gradient norm {bad.grad_norm:.4g}. {KEPT} Check the data for NaN or "
            f"infinity, lower optimizer.lr, or set optimizer.clip=1.0; guard.window is the number "
            f"of such steps in a row that stops a run. {FIND}"
        )


class EndGuard:
    """Response that stops or rolls back at the first bad step."""

    def __init__(
        self,
        policy: RollbackPolicy | StopPolicy,
        earlier: Sequence[int],
        known: Mapping[str, Any],
    ):
        self._policy, self._earlier = policy, earlier
        past = {name: known[name] for name in RunningMean.STATE if name in known}
        self.means = RunningMean(policy.spike.memory, **past)

    def judge(self, numbers: StepNumbers, was_skipped: bool) -> Stop | None:
        """Judge a step; a `Stop` ends the run, or rolls it back."""
        step, loss, grad_norm, update_norm, _, _ = numbers
        finite = not was_skipped and math.isfinite(loss + grad_norm + update_norm)
        what = self._describe_spike(loss, grad_norm) if finite else numbers.describe()
        if not what:
            self.means.absorb(loss, grad_norm)
            return None
        policy, why = self._policy, f"step {step} {what}."
        if isinstance(policy, StopPolicy):
            return Stop(why, "failed")
        recent = [earlier for earlier in self._earlier if earlier > step - policy.within]
        if len(recent) < policy.limit:
            return Rollback(why, step=step, back=policy.back, skip=policy.skip)
        steps = ", ".join(map(str, recent))
        return Stop(
            f"{why} The run was rolled back {len(recent)} times within {policy.within} steps (for "
            f"{steps or 'none'}), and guard.limit is {policy.limit}.",
            "failed",
        )

    def state(self) -> dict[str, Any]:
        """Return JSON for a checkpoint, from which another instance resumes."""
        return self.means.state()

    def _describe_spike(self, loss: float, grad_norm: float) -> str:
        spike, means = self._policy.spike, self.means
        if means.above("loss", loss, spike.loss):
            return f"is a spike: loss {loss:.4g}, and the mean before it {means.loss:.4g}"
        if means.above("grad_norm", grad_norm, spike.grad_norm):
            mean = means.grad_norm
            return f"is a spike: gradient norm {grad_norm:.4g}, and the mean before it {mean:.4g}"
        return ""


@dataclasses.dataclass
class RunningMean:
    """Means over roughly the last `memory` steps: weights decay by `1 - 1/memory` a step.

    Only finite numbers are included. The weights add up to 1 from the first step on.
    """

    STATE: ClassVar = ("steps", "loss", "grad_norm")
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
        """Return whether a loss or norm is more than `factor` times its mean; 0 is not a bound.

        With a mean below zero: whether it exceeds the mean by `factor - 1` times its size.
        """
        mean = getattr(self, name)
        known = factor > 0 and self.steps >= self.memory
        return known and value - mean > (factor - 1) * abs(mean)

    def state(self) -> dict[str, Any]:
        """Return JSON of which another instance is made, `RunningMean(memory, **state)`."""
        return {name: getattr(self, name) for name in self.STATE}
