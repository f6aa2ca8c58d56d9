"""Bad steps: the recorder that judges each step by the config's `guard`, and why a run failed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jtrain.config.lookup import FIT
from jtrain.config.sections import RollbackPolicy, SkipPolicy, StopPolicy
from jtrain.core.loop import FinishedSteps, Recorder, Stop
from jtrain.distributed.multihost import all_gather
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStep, BadStepLog
from jtrain.train.hooks.guards import FIND, EndGuard, SkipGuard, StepNumbers


class BadSteps(Recorder):
    """Recorder that judges each step, in one of the three ways of the config.

    Steps are judged some calls late, but all steps up to a checkpoint before the checkpoint is
    written, so no checkpoint is later than a bad step. In several processes the numbers are those
    of the whole batch and equal to the bit, so all processes decide alike.

    Args:
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
        log: BadStepLog,
        *,
        every: int = 1,
        start: int = 0,
        skipped: int = 0,
        earlier: Sequence[int] = (),
        minimum: float = 0.0,
        known: Mapping[str, Any] = {},
    ):
        self._config, self.log = config, log
        """The log of bad steps."""
        self.bad: BadStep | None = None
        """Step that ends the run or rolls it back: no later state is worth saving."""
        self._skipped, self._minimum = skipped, minimum
        self._every, self._judged = every, start
        self._waiting: list[FinishedSteps] = []
        self._asked: Stop | None = None
        self._skips: SkipGuard | None = None
        self._quiet_steps_matter = True
        match config.guard:
            case SkipPolicy() as policy:
                self._guard = self._skips = SkipGuard(config, policy, log, start, known)
                self._quiet_steps_matter = False
            case RollbackPolicy() | StopPolicy() as policy:
                self._guard = EndGuard(policy, earlier, known)
                self._quiet_steps_matter = bool(policy.spike.loss or policy.spike.grad_norm)
            case policy:
                self._guard = policy.make_judge(known)

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

    def stop_at_end(self, step: int) -> Stop | None:
        """Judge the remaining steps, and warn of those that were skipped."""
        stop = self.judge_all()
        if self._skips:
            stop = stop or self._skips.end_of(step)
            self._skips.warn(step)
        return stop

    def _judge(self, last: int | None) -> None:
        waiting, self._waiting = self._waiting, []
        for finished in waiting:
            first, end = self._judged + 1, finished.steps[-1]
            if last is not None and last < end:
                self._waiting.append(finished)
                end = last
            columns = [_column(finished, name) for name in StepNumbers._fields[1:]]
            *values, skipped, _ = columns
            is_quiet = skipped[-1] == self._skipped and np.isfinite(values).all()
            if not is_quiet or self._quiet_steps_matter:
                rows = zip(finished.steps, *columns, strict=True)
                for numbers in map(StepNumbers._make, rows):
                    if first <= numbers.step <= end:
                        self._judge_step(numbers)
            self._judged = end
            if self._skips and end // self._every > (first - 1) // self._every:
                self._asked = self._asked or self._skips.end_of(end - end % self._every)

    def _judge_step(self, numbers: StepNumbers) -> None:
        before, self._skipped = self._skipped, round(numbers.skipped)
        # Above the minimum an overflow lowers the loss scale.
        adapts = numbers.overflows and numbers.loss_scale > self._minimum
        if adapts or self._asked:
            return
        self._asked = self._guard.judge(numbers, self._skipped > before)
        if self._asked and not self._skips:
            step, loss, grad_norm, update_norm, _, _ = numbers
            self.bad = BadStep(step, self._asked.why, loss, grad_norm, update_norm)

    def explain_failure(self, stop: Stop, *, last: int) -> Stop:
        """Return the `Stop` of a failed run, with the data that explains it and what to type.

        Args:
            last: step at which the run ended.
        """
        bad, config = self.bad, self._config
        window = min(getattr(config.guard, "window", 0), config.steps)
        first = max(1, last - window - 10 * self._every)
        blame = _describe_nonfinite(self.log, range(first, last + 1))
        if bad:  # in every process, each of which has read rows of its own
            blame = next((each for each in all_gather(blame) if "every value" not in each), blame)
            late = f"It was found at step {last}: numbers are read some calls late. "
            late = late if last > bad.step else ""
            batch = self.log.describe_batch(bad.step)["batch"]
            blame = f"{late}{blame} {_advise(config, bad, batch)}"
        why = f"{stop.why} {blame}"
        if bad:
            self.log.append(bad, "stopped", why=why)
        return dataclasses.replace(stop, why=why)

    def state(self) -> dict[str, Any]:
        """Return JSON for a checkpoint, from which another instance resumes."""
        return self._guard.state()


def _column(finished: FinishedSteps, name: str) -> Any:
    found = finished.metrics.get(name)
    return [math.nan] * len(finished.steps) if found is None else found.value().tolist()


def _advise(config: RunConfig, bad: BadStep, batch: int) -> str:
    """Return what to type after a bad step that ended a run."""
    if math.isfinite(bad.loss + bad.grad_norm) and not math.isfinite(bad.update_norm):
        return (
            f"It took batch {batch}, and loss and gradient of that are finite: the update alone "
            f"is not, so the data is not the cause. Lower the learning rate, or clip the gradient, "
            f"in a run of its own: optimizer.lr, optimizer.clip."
        )
    how = f": jtrain run runs/{config.name}/config.yaml guard.without='[[{batch}, {batch + 1}]]'"
    if config.experiment == FIT:  # no config of it can be run
        how = ', repeat the call with guard="skip"'
    return f"It took batch {batch}. To go on without that batch{how}. {FIND}"


def _describe_nonfinite(log: BadStepLog, steps: range) -> str:
    for step in steps:
        if found := log.find_nonfinite(step):
            value, row = found
            origin = "" if row is None else f" (row {row} of the data set)"
            place = f"row {value.row} of `{value.array}`"
            return f"In the batch of step {step}, {place} has {value}{origin}."
    return f"In the batches of steps {steps[0]} to {steps[-1]} every value is finite."
