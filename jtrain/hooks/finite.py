"""Notices steps that were skipped because loss or gradient was not finite."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jtrain.hooks.events import Bad
from jtrain.loop import Hook, Stop
from jtrain.types import Metrics

FIND = "The operation, the leaf and the rows: the same command with --find-nan."
_TOLD = ("loss", "grad_norm", "skipped")


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
        event: is told of each step that was skipped.
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
        event: Callable[[Bad], None] = lambda bad: None,
    ):
        self.every, self._minimum = every, minimum
        self._tell, self._step, self._skipped = tell, start, skipped
        self._most, self._within, self._event = most, within, event
        self._calls: collections.deque[tuple[int, Metrics]] = collections.deque()
        self._bad: list[Bad] = []

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keeps the numbers, as they lie on the device, until the next look."""
        del state
        self._calls.append((step, {name: metrics[name] for name in _TOLD}))

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Compares the number of skipped steps with that of the last look."""
        first, steps, before = self._step + 1, step - self._step, self._skipped
        skipped = round(numbers["skipped"]) - before
        self._step, self._skipped = step, before + skipped
        calls = [self._calls.popleft() for _ in self._calls.copy() if self._calls[0][0] <= step]
        scale = numbers.get("loss_scale")
        if skipped == 0 or (scale is not None and scale > self._minimum):
            return None
        found = _skipped(calls, before)
        for bad in found:
            self._event(bad)
        self._bad += found
        recent = [bad.step for bad in self._bad if bad.step > step - self._within]
        if 0 < self._most <= len(recent):
            return Stop(
                f"{len(recent)} steps within {self._within} were skipped, and guard.most is "
                f"{self._most}: step {found[-1].step} {found[-1].what}. The parameters are those "
                f"of the last finite step. Check the data for NaN or infinity, or lower "
                f"optimizer.lr. {FIND}",
                "failed",
            )
        if scale is not None:
            return Stop(
                f"the loss scale is at its minimum of {scale:g} and {skipped} of the steps {first} "
                f"to {step} overflowed float16 all the same. The parameters are those of the last "
                f"finite step. Check the data for NaN or infinity, set precision.kind=bf16, which "
                f"has the range of float32, or lower optimizer.lr. {FIND}",
                "failed",
            )
        if skipped < steps or (steps == 1 and self.every > 1):
            self._tell(
                f"steps {first} to {step}: {skipped} of {steps} skipped, loss or gradient was not "
                f"finite. The others were taken; if this goes on, lower optimizer.lr."
            )
            return None
        return Stop(
            f"no step from {first} to {step} was finite: loss {numbers['loss']:.4g}, gradient norm "
            f"{numbers['grad_norm']:.4g}. The parameters are those of the last finite step. Check "
            f"the data for NaN or infinity, lower optimizer.lr, or set optimizer.clip=1.0. {FIND}",
            "failed",
        )


def _skipped(calls: list[tuple[int, Metrics]], before: int) -> list[Bad]:
    """The steps of these calls that were skipped, where so many were before them."""
    bad = []
    for last, metrics in calls:
        told = jax.device_get(metrics)
        found = {name: np.atleast_1d(mean.value()) for name, mean in told.items()}
        for place, count in enumerate(found["skipped"]):
            step = last - len(found["skipped"]) + 1 + place
            if count > before:
                loss, norm = float(found["loss"][place]), float(found["grad_norm"][place])
                what = f"is not finite: loss {loss:.4g}, gradient norm {norm:.4g}"
                bad.append(Bad(step, what, loss, norm))
            before = round(count)
    return bad
