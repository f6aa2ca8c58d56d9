"""Bad steps: they are skipped, rolled back or end the run, as the config's `guard` says."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.config.sections import GuardPolicy, RollbackPolicy, SkipPolicy, StopPolicy
from jtrain.core.loop import FinishedSteps, Recorder, Rollback, Stop
from jtrain.data.batches.scan import find_nonfinite
from jtrain.io.log import LOG
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStep, BadStepLog, Done, StepRows

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
        """Return a description of a step that was skipped."""
        if math.isfinite(self.loss + self.grad_norm):
            return f"makes extra non-finite: loss {self.loss:.4g}"
        return f"is not finite: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"


class BadSteps(Recorder):
    """Recorder that judges each step, in one of the three ways of the config.

    Steps are judged some calls late, but all steps up to a checkpoint before the checkpoint is
    written, so no checkpoint is later than a bad step. In several processes the numbers are those
    of the whole batch and equal to the bit, so all processes decide alike.

    Args:
        events: the log of bad steps.
        batches: batch of each step, as this process reads it.
        every: steps between two multiples at which a bad step may end the loop.
        start: the step that the run resumes from.
        skipped: steps that were skipped before it (`state.skipped`).
        earlier: the bad steps that the run was rolled back for before.
        minimum: smallest loss scale, if there is one. Above it an overflow of the gradient is how
            the scale adapts, and is not bad.
        known: the result of `state` in the checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        events: BadStepLog,
        batches: StepRows,
        *,
        every: int = 1,
        start: int = 0,
        skipped: int = 0,
        earlier: Sequence[int] = (),
        minimum: float = 0.0,
        known: Mapping[str, Any] = {},
    ):
        self._events, self.batches = events, batches
        self._skipped, self._minimum = skipped, minimum
        self._every, self._judged = every, start
        self._waiting: list[FinishedSteps] = []
        self._asked: Stop | None = None
        self.bad: BadStep | None = None
        """Step that ends the run or rolls it back: no later state is worth saving."""
        policy = config.guard
        self._response: _Skip | _End | _Own
        match policy:
            case SkipPolicy():
                self._response = _Skip(config, policy, self, start, known)
            case RollbackPolicy() | StopPolicy():
                self._response = _End(policy, self, earlier, known)
            case _:
                self._response = _Own(policy, self, known)

    def on_steps(self, finished: FinishedSteps) -> Stop | None:
        """Judge the steps up to a multiple of `every`; a bad one may end the loop there."""
        self._waiting.append(finished)
        last = finished.steps[-1]
        if last // self._every == (finished.steps[0] - 1) // self._every:
            return None
        self._judge(last - last % self._every)
        return self._asked

    def judge_all(self) -> Stop | None:
        """Judge all steps, before a state is saved and at the end; return whether it ends there."""
        self._judge(None)
        return self._asked

    def ended(self, step: int) -> Stop | None:
        """Judge the remaining steps, and warn of those that were skipped up to the last."""
        stop = self.judge_all() or self._response.end_of(step)
        self._response.warn(step)
        return stop

    def _judge(self, last: int | None) -> None:
        """Judge the waiting steps up to `last`, or all."""
        waiting, self._waiting = self._waiting, []
        for finished in waiting:
            first, end = self._judged + 1, finished.steps[-1]
            if last is not None and last < end:
                self._waiting.append(finished)
                end = last
            columns = [_column(finished, name) for name in StepNumbers._fields[1:]]
            *values, skipped, _ = columns
            is_quiet = skipped[-1] == self._skipped and np.isfinite(values).all()
            if not is_quiet or self._response.reads_all:
                rows = zip(finished.steps, *columns, strict=True)
                for numbers in map(StepNumbers._make, rows):
                    if first <= numbers.step <= end:
                        self._judge_step(numbers)
            self._judged = end
            if end // self._every > (first - 1) // self._every:
                self._asked = self._asked or self._response.end_of(end - end % self._every)

    def _judge_step(self, numbers: StepNumbers) -> None:
        before, self._skipped = self._skipped, round(numbers.skipped)
        # Above the minimum an overflow lowers the loss scale.
        adapts = numbers.overflows and numbers.loss_scale > self._minimum
        if not (adapts or self._asked):
            was_skipped = self._skipped > before
            self._asked = self._response.judge(numbers, was_skipped)

    def state(self) -> dict[str, Any]:
        """Return JSON for a checkpoint, from which another instance resumes."""
        return self._response.state()

    def describe_data(self, step: int) -> str:
        """Describe what is not finite in the data of a step, and where; "" if all is finite."""
        found = find_nonfinite(self.batches.read(step))
        if found is None:
            return ""
        rows = self.batches.report(step).get("rows")
        row = f"row {rows[found.row]}" if rows else f"row {found.row} of the batch of step {step}"
        return f"{row} of `{found.array}` has {found}"

    def record(self, bad: BadStep, done: Done, **more: Any) -> None:
        """Append a bad step to the log, with the data that it took."""
        self._events.append(bad, done, **self.batches.report(bad.step), **more)


class _Skip:
    """Response that counts skipped steps, names their data, and ends a run of too many."""

    reads_all = False

    def __init__(
        self,
        config: RunConfig,
        policy: SkipPolicy,
        steps: BadSteps,
        start: int,
        known: Mapping[str, Any],
    ):
        self._policy, self._steps = policy, steps
        self._window = min(policy.window, config.steps)
        self._log_every, self._logged_at, self._unlogged = config.log.every, start, 0
        self._last: int = known.get("last", 0)  # skipped step
        self._in_a_row: int = known.get("in_a_row", 0)
        self._recent = collections.deque[int](known.get("bad", ()))
        self._data_steps: int = known.get("data_steps", 0)
        self._named = dict.fromkeys(known.get("named", ()))
        self._cause: str = known.get("cause", "")

    def judge(self, numbers: StepNumbers, was_skipped: bool) -> Stop | None:
        if not was_skipped:
            return None
        step = numbers.step
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last, self._unlogged = step, self._unlogged + 1
        bad = BadStep(step, numbers.describe(), numbers.loss, numbers.grad_norm)
        self._steps.record(bad, "skipped")
        self._name_data(step)
        why = self._why_overflow(numbers) or self._why_many(bad) or self._why_none(bad)
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
        return {
            "last": self._last,
            "in_a_row": self._in_a_row,
            "bad": list(self._recent),
            "data_steps": self._data_steps,
            "named": list(self._named),
            "cause": self._cause,
        }

    def _name_data(self, step: int) -> None:
        self._cause = self._steps.describe_data(step)
        if not self._cause:
            return
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

    def _why_many(self, bad: BadStep) -> str:
        most, within = self._policy.most, self._policy.within
        if not most:
            return ""
        self._recent.append(bad.step)
        while self._recent[0] <= bad.step - within:
            self._recent.popleft()
        if len(self._recent) < most:
            return ""
        return (
            f"{len(self._recent)} steps within {within} were skipped, and guard.most is {most}: "
            f"step {bad.step} {bad.what}. {KEPT} Check the data for NaN or infinity, or lower "
            f"optimizer.lr. {FIND}"
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


class _End:
    """Response that stops or rolls back at the first bad step."""

    def __init__(
        self,
        policy: RollbackPolicy | StopPolicy,
        steps: BadSteps,
        earlier: Sequence[int],
        known: Mapping[str, Any],
    ):
        self._policy, self._steps, self._earlier = policy, steps, earlier
        self.means = RunningMean(policy.spike.memory)
        self.means.restore(known)
        self.reads_all = bool(policy.spike.loss or policy.spike.grad_norm)

    def judge(self, numbers: StepNumbers, was_skipped: bool) -> Stop | None:
        _, loss, grad_norm, update_norm, _, _ = numbers
        what = numbers.describe() if was_skipped else self._describe(numbers)
        if not what:
            self.means.absorb(loss, grad_norm)
            return None
        self._steps.bad = bad = BadStep(numbers.step, what, loss, grad_norm, update_norm)
        policy, why = self._policy, f"step {bad.step} {what}."
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

    def end_of(self, step: int) -> None:
        """Nothing is owed at the end of a group of steps."""

    def warn(self, step: int) -> None:
        """No step is skipped without an end."""

    def state(self) -> dict[str, Any]:
        return self.means.state()

    def _describe(self, numbers: StepNumbers) -> str:
        """Return what is wrong with a step, in words; "" for a good step."""
        _, loss, grad_norm, update_norm, _, _ = numbers
        spike, means = self._policy.spike, self.means
        if not math.isfinite(loss + grad_norm + update_norm):
            update = f", update norm {update_norm:g}" if math.isfinite(grad_norm) else ""
            return f"is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}{update}"
        if means.above("loss", loss, spike.loss):
            return f"is a spike: loss {loss:.4g}, and the mean before it {means.loss:.4g}"
        if means.above("grad_norm", grad_norm, spike.grad_norm):
            mean = means.grad_norm
            return f"is a spike: gradient norm {grad_norm:.4g}, and the mean before it {mean:.4g}"
        return ""


class _Own:
    """Response of a policy of another package."""

    reads_all = True

    def __init__(self, policy: GuardPolicy, steps: BadSteps, known: Mapping[str, Any]):
        self._steps, self._judge = steps, policy.make_judge(known)

    def judge(self, numbers: StepNumbers, was_skipped: bool) -> Stop | None:
        asked = self._judge.judge(numbers, was_skipped)
        if asked:
            step, loss, grad_norm, update_norm, _, _ = numbers
            self._steps.bad = BadStep(step, asked.why, loss, grad_norm, update_norm)
        return asked

    def end_of(self, step: int) -> None:
        """Nothing is owed at the end of a group of steps."""

    def warn(self, step: int) -> None:
        """The policy warns by itself."""

    def state(self) -> dict[str, Any]:
        return self._judge.state()


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
        return {"steps": self.steps, "loss": self.loss, "grad_norm": self.grad_norm}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the means to a saved state; an empty one restarts them."""
        self.steps = state.get("steps", 0)
        self.loss, self.grad_norm = state.get("loss", 0.0), state.get("grad_norm", 0.0)


def _column(finished: FinishedSteps, name: str) -> Any:
    """Return a number of each step; NaN where there is none."""
    found = finished.metrics.get(name)
    return [math.nan] * len(finished.steps) if found is None else found.value().tolist()
