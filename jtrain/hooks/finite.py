"""Notices steps that were skipped because loss or gradient was not finite."""

import collections
from collections.abc import Callable, Mapping

from jtrain.hooks.events import Bad
from jtrain.hooks.recent import Recent
from jtrain.loop import Hook, Stop

FIND = "The operation, the leaf and the rows: the same command with --find-nan."


class Finite(Hook):
    """Warns when some steps were skipped, and stops a run in which all were.

    A step that is not finite leaves the state as it was, so nothing is lost by looking only now and
    then; a run in which no step is finite any more learns nothing.

    Args:
        every: steps between two looks. At 1 the first step that is not finite stops the run.
        tell: takes a line of warning.
        start: the step that the run goes on from.
        skipped: steps that were skipped before it (`state.skipped`).
        minimum: of the loss scale, if there is one. Above it a skipped step is how the scale finds
            its place, and nothing is said; at it the run is stopped.
        most: steps skipped of the last `within` at which the run is stopped; 0: however many.
        within: steps.
        recent: knows the steps since the last look; stands among the hooks too.
        event: is told of each step that was skipped.
        cause: gives why the last of them was, if the data says so; else nothing.
    """

    def __init__(
        self,
        *,
        every: int,
        tell: Callable[[str], None],
        start: int = 0,
        skipped: int = 0,
        minimum: float = 0.0,
        most: int = 0,
        within: int = 1000,
        recent: Recent | None = None,
        event: Callable[[Bad], None] = lambda bad: None,
        cause: Callable[[], str] = lambda: "",
    ):
        self.every, self._minimum = every, minimum
        self._tell, self._step, self._skipped = tell, start, skipped
        self._most, self._within, self._event = most, within, event
        self._cause = cause
        self._recent, self._bad = recent, collections.deque[int]()

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Compares the number of skipped steps with that of the last look."""
        first, steps, before = self._step + 1, step - self._step, self._skipped
        skipped = round(numbers["skipped"]) - before
        self._step, self._skipped = step, before + skipped
        found = self._found(step, before) if skipped else []
        if self._recent:
            self._recent.forget(step)
        scale = numbers.get("loss_scale")
        if skipped == 0 or (scale is not None and scale > self._minimum):
            return None
        for bad in found:
            self._event(bad)
        if stop := self._too_many(found):
            return stop
        if scale is not None:
            return Stop(
                f"the loss scale is at its minimum of {scale:g} and {skipped} of the steps {first} "
                f"to {step} overflowed float16 all the same. The parameters are those of the last "
                f"finite step. Check the data for NaN or infinity, set precision.kind=bf16, which "
                f"has the range of float32, or lower optimizer.lr. {FIND}",
                "failed",
            )
        if skipped < steps or (steps == 1 and self.every > 1):
            advice = self._cause() or "if this goes on, lower optimizer.lr"
            self._tell(
                f"steps {first} to {step}: {skipped} of {steps} skipped, loss or gradient was not "
                f"finite. The others were taken; {advice}."
            )
            return None
        return Stop(
            f"no step from {first} to {step} was finite: loss {numbers['loss']:.4g}, gradient norm "
            f"{numbers['grad_norm']:.4g}. The parameters are those of the last finite step. Check "
            f"the data for NaN or infinity, lower optimizer.lr, or set optimizer.clip=1.0. {FIND}",
            "failed",
        )

    def _found(self, step: int, before: int) -> list[Bad]:
        """The steps since the last look that were skipped, of which there were so many before."""
        found = []
        for told in self._recent.upto(step) if self._recent else []:
            if told.skipped > before:
                what = f"is not finite: loss {told.loss:.4g}, gradient norm {told.grad_norm:.4g}"
                found.append(Bad(told.step, what, told.loss, told.grad_norm))
            before = told.skipped
        return found

    def _too_many(self, found: list[Bad]) -> Stop | None:
        """Ends the run if more were skipped than may be."""
        for bad in found if self._most else []:
            self._bad.append(bad.step)
            while self._bad[0] <= bad.step - self._within:
                self._bad.popleft()
            if len(self._bad) >= self._most:
                return Stop(
                    f"{len(self._bad)} steps within {self._within} were skipped, and guard.most is "
                    f"{self._most}: step {bad.step} {bad.what}. The parameters are those of the "
                    f"last finite step. Check the data for NaN or infinity, or lower optimizer.lr. "
                    f"{FIND}",
                    "failed",
                )
        return None
