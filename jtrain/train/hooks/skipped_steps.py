"""Skipped steps: warnings about steps that were not finite, and the end of a run of too many."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.loop import Hook, StatelessHook, Stop
from jtrain.core.types import Metrics
from jtrain.train.hooks.bad_steps import BadStep, describe_skipped_step
from jtrain.train.program import select


class StepMetrics(NamedTuple):
    """Numbers of a step."""

    step: int
    loss: float
    grad_norm: float
    skipped: int
    """Steps that were skipped so far, with this one."""
    scale: float = math.nan
    """Loss scale of the step; NaN without loss scaling."""


_NAMES = ("loss", "grad_norm", "skipped", "loss_scale")


class RecentSteps(StatelessHook):
    """Hook that keeps the steps since the last `forget`; only `read` fetches from a device."""

    def __init__(self):
        self._calls: collections.deque[tuple[int, Metrics]] = collections.deque()
        self._forgotten = 0

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keep the numbers of a call."""
        self._calls.append((step, select(metrics, _NAMES)))

    def forget(self, step: int) -> None:
        """Drop the steps up to this one."""
        self._forgotten = step
        while self._calls and self._calls[0][0] <= step:
            self._calls.popleft()

    def read(self, step: int) -> list[StepMetrics]:
        """Return the stored steps up to this one."""
        steps: list[StepMetrics] = []
        for last, metrics in self._calls:
            if steps and steps[-1].step > step:
                break
            fetched = jax.device_get(metrics)
            means = [fetched[name].value() for name in _NAMES if name in fetched]
            columns = [np.atleast_1d(each).tolist() for each in means]
            first = last - len(columns[0]) + 1
            for number, (loss, norm, skipped, *scale) in enumerate(
                zip(*columns, strict=True), first
            ):
                steps.append(StepMetrics(number, loss, norm, round(skipped), *scale))
        return [each for each in steps if self._forgotten < each.step <= step]


FIND = "To find the operation, the leaf and the rows, add --find-nan to the same command."
KEPT = "The parameters are those of the last finite step."
MAX_EVERY = 10  # steps between two checks; a check takes some 50 us


class SkippedSteps(Hook):
    """Hook that warns of skipped steps, and stops a run after `window` of them in a row.

    A skipped step leaves the state unchanged, so rare checks lose nothing. The steps of the checks
    depend on `window` and the steps of a call only, so neither logging nor an interruption changes
    where the run ends.

    Args:
        steps_per_call: steps in a call.
        window: the run is stopped after this many skipped steps in a row.
        most: the run is stopped if this many of the last `within` steps were skipped; 0: no limit.
        within: steps.
        minimum: smallest loss scale, if there is one. Above it an overflow of the gradient is how
            the scale adapts, and is not counted; at the minimum the run is stopped.
        recent: keeps the steps since the last check; comes before this hook.
        event: takes each step that was skipped.
        log: takes a line of warning.
        log_every: steps between two warnings.
        start: the step that the run resumes from.
        skipped: steps that were skipped before it (`state.skipped`).
        cause: gives the cause of the last skipped step if it is the data; else "".
        known: the result of `state` in the checkpoint.
    """

    last = True

    def __init__(
        self,
        *,
        recent: RecentSteps,
        log: Callable[[str], None],
        log_every: int = MAX_EVERY,
        steps_per_call: int = 1,
        window: int = 50,
        most: int = 0,
        within: int = 1000,
        minimum: float = 0.0,
        event: Callable[[BadStep], None] = lambda bad: None,
        cause: Callable[[], str] = lambda: "",
        start: int = 0,
        skipped: int = 0,
        known: Mapping[str, Any] = {},
    ):
        self.every = -(-min(window, MAX_EVERY) // steps_per_call) * steps_per_call
        self._recent, self._event, self._minimum = recent, event, minimum
        self._cause = cause
        self._window, self._most, self._within = window, most, within
        self._log, self._log_every, self._logged_at, self._unlogged = log, log_every, start, 0
        self._skipped, self._counted = skipped, start
        self._in_a_row: int = known.get("in_a_row", 0)
        self._bad = collections.deque[int](known.get("bad", ()))
        self._why: str = known.get("why", "")

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Check the steps since the last check."""
        if round(numbers["skipped"]) > self._skipped:
            self.catch_up(step)
        elif step > self._counted:
            self._in_a_row, self._counted = 0, step
            self._recent.forget(step)
        if self._why:
            return Stop(self._why, "failed")
        if step - self._logged_at >= self._log_every:
            self.warn(step)
        return None

    def catch_up(self, step: int) -> None:
        """Count the steps up to this one; waits until they are done."""
        for metrics in self._recent.read(step):
            self._count(metrics)
        self._counted = step
        self._recent.forget(step)

    def warn(self, step: int) -> None:
        """Log how many steps were skipped since the last warning, unless they stop the run."""
        steps, skipped = step - self._logged_at, self._unlogged
        if skipped and not self._why:
            advice = self._cause() or "if this continues, lower optimizer.lr"
            rest = "The others were taken; " if skipped < steps else ""
            words = f"{rest}{advice}" if rest else f"{advice[0].upper()}{advice[1:]}"
            self._log(
                f"steps {self._logged_at + 1} to {step}: {skipped} of {steps} skipped, loss or "
                f"gradient was not finite. {words}."
            )
        self._logged_at, self._unlogged = step, 0

    def state(self) -> dict[str, Any]:
        """Return JSON that another instance can resume from; call `catch_up` first."""
        return {"in_a_row": self._in_a_row, "bad": list(self._bad), "why": self._why}

    def _count(self, step: StepMetrics) -> None:
        before, self._skipped = self._skipped, step.skipped
        if step.skipped == before:
            self._in_a_row = 0
            return
        overflow = math.isfinite(step.loss) and not math.isfinite(step.grad_norm)
        if overflow and step.scale > self._minimum:
            return
        self._in_a_row += 1
        self._unlogged += 1
        bad = BadStep(
            step.step, describe_skipped_step(step.loss, step.grad_norm), step.loss, step.grad_norm
        )
        self._event(bad)
        if overflow and step.scale <= self._minimum:
            self._why = self._why or (
                f"step {bad.step} overflowed float16 at the smallest loss scale, "
                f"precision.minimum={step.scale:g}. {KEPT} Check the data for NaN or infinity, set "
                f"precision.kind=bf16, which has the range of float32, or lower optimizer.lr. "
                f"{FIND}"
            )
        self._why = self._why or self._too_many(bad) or self._none_finite(bad)

    def _none_finite(self, bad: BadStep) -> str:
        """Return why the run ends if `window` steps in a row were skipped; else ""."""
        if self._in_a_row < self._window:
            return ""
        return (
            f"no step from {bad.step - self._window + 1} to {bad.step} was finite: loss "
            f"{bad.loss:.4g}, gradient norm {bad.grad_norm:.4g}. {KEPT} Check the data for NaN or "
            f"infinity, lower optimizer.lr, or set optimizer.clip=1.0; guard.window is the number "
            f"of such steps in a row that stops a run. {FIND}"
        )

    def _too_many(self, bad: BadStep) -> str:
        """Return why the run ends if `most` of the last steps were skipped; else ""."""
        if not self._most:
            return ""
        self._bad.append(bad.step)
        while self._bad[0] <= bad.step - self._within:
            self._bad.popleft()
        if len(self._bad) < self._most:
            return ""
        return (
            f"{len(self._bad)} steps within {self._within} were skipped, and guard.most is "
            f"{self._most}: step {bad.step} {bad.what}. {KEPT} Check the data for NaN or infinity, "
            f"or lower optimizer.lr. {FIND}"
        )
