"""Counts the steps that were skipped because loss or gradient was not finite, and stops the run."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

from jtrain.core.loop import Hook, Stop
from jtrain.train.hooks.bad_step_log import BadStep, not_finite
from jtrain.train.hooks.recent_steps import RecentSteps, StepMetrics

FIND = "The operation, the leaf and the rows: the same command with --find-nan."
KEPT = "The parameters are those of the last finite step."
LOOK = 10  # steps between two looks at most; each takes some 50 us


class SkippedSteps(Hook):
    """Warns when steps were skipped, and stops a run in which none of `window` in a row was finite.

    A skipped step leaves the state as it was, so nothing is lost by looking only now and then. The
    steps at which it looks follow from `window` and the steps of a call alone, so neither what is
    logged nor an interruption changes where the run ends.

    Args:
        steps_per_call: steps in a call.
        window: steps in a row, none of them finite, after which the run is stopped.
        most: steps skipped of the last `within` after which it is stopped; 0: however many.
        within: steps.
        minimum: of the loss scale, if there is one. Above it an overflow of the gradient is how the
            scale finds its place, and not counted; at it the run is stopped.
        recent: keeps the steps since the last look; stands before this hook.
        event: takes each step that was skipped.
        tell: takes a line of warning.
        tell_every: steps between two such lines.
        start: the step that the run goes on from.
        skipped: steps that were skipped before it (`state.skipped`).
        cause: gives why the last of them was, if the data says so; else nothing.
        known: what `state` gave when the checkpoint was saved.
    """

    last = True

    def __init__(
        self,
        *,
        recent: RecentSteps,
        tell: Callable[[str], None],
        tell_every: int = LOOK,
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
        self.every = -(-min(window, LOOK) // steps_per_call) * steps_per_call
        self._recent, self._event, self._minimum = recent, event, minimum
        self._cause = cause
        self._window, self._most, self._within = window, most, within
        self._tell, self._tell_every, self._told_at, self._untold = tell, tell_every, start, 0
        self._skipped, self._counted = skipped, start
        self._in_a_row: int = known.get("in_a_row", 0)
        self._bad = collections.deque[int](known.get("bad", ()))
        self._why: str = known.get("why", "")

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Looks at the steps since the last look."""
        if round(numbers["skipped"]) > self._skipped:
            self.catch_up(step)
        elif step > self._counted:
            self._in_a_row, self._counted = 0, step
            self._recent.forget(step)
        if self._why:
            return Stop(self._why, "failed")
        if step - self._told_at >= self._tell_every:
            self.warn(step)
        return None

    def catch_up(self, step: int) -> None:
        """Counts the steps up to this one, the end of a call, and waits until they are done."""
        for told in self._recent.upto(step):
            self._count(told)
        self._counted = step
        self._recent.forget(step)

    def warn(self, step: int) -> None:
        """Tell how many steps were skipped since the last line, unless they stop the run."""
        steps, skipped = step - self._told_at, self._untold
        if skipped and not self._why:
            advice = self._cause() or "if this goes on, lower optimizer.lr"
            rest = "The others were taken; " if skipped < steps else ""
            words = f"{rest}{advice}" if rest else f"{advice[0].upper()}{advice[1:]}"
            self._tell(
                f"steps {self._told_at + 1} to {step}: {skipped} of {steps} skipped, loss or "
                f"gradient was not finite. {words}."
            )
        self._told_at, self._untold = step, 0

    def state(self) -> dict[str, Any]:
        """Return JSON of which another one of these goes on; call `catch_up` first."""
        return {"in_a_row": self._in_a_row, "bad": list(self._bad), "why": self._why}

    def _count(self, told: StepMetrics) -> None:
        before, self._skipped = self._skipped, told.skipped
        if told.skipped == before:
            self._in_a_row = 0
            return
        overflow = math.isfinite(told.loss) and not math.isfinite(told.grad_norm)
        if overflow and told.scale > self._minimum:
            return
        self._in_a_row += 1
        self._untold += 1
        bad = BadStep(told.step, not_finite(told.loss, told.grad_norm), told.loss, told.grad_norm)
        self._event(bad)
        if overflow and told.scale <= self._minimum:
            self._why = self._why or (
                f"step {bad.step} overflowed float16 at the smallest loss scale, "
                f"precision.minimum={told.scale:g}. {KEPT} Check the data for NaN or infinity, set "
                f"precision.kind=bf16, which has the range of float32, or lower optimizer.lr. "
                f"{FIND}"
            )
        self._why = self._why or self._too_many(bad) or self._none_finite(bad)

    def _none_finite(self, bad: BadStep) -> str:
        """Return why the run ends if `window` steps in a row were skipped; else nothing."""
        if self._in_a_row < self._window:
            return ""
        return (
            f"no step from {bad.step - self._window + 1} to {bad.step} was finite: loss "
            f"{bad.loss:.4g}, gradient norm {bad.grad_norm:.4g}. {KEPT} Check the data for NaN or "
            f"infinity, lower optimizer.lr, or set optimizer.clip=1.0; guard.window says after how "
            f"many such steps in a row a run stops. {FIND}"
        )

    def _too_many(self, bad: BadStep) -> str:
        """Return why the run ends if `most` of the last steps were skipped; else nothing."""
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
