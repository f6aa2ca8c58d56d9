"""Grace period: whether a run that is asked to end has the time to save."""

import dataclasses
from collections.abc import Callable, Mapping

from jtrain.core.loop import IN_FLIGHT, Hook
from jtrain.io.formatting import format_duration


@dataclasses.dataclass
class GraceBudget:
    """Measured times of what a run does when it is asked to end, beside its grace period."""

    seconds: float = 25.0
    """The grace period."""
    call: float | None = None
    """Seconds of a call of the step; None until measured."""
    save: float | None = None
    """Seconds of a save; None until measured."""

    @property
    def needed(self) -> float | None:
        """Seconds for the calls in flight, one more, and a save; None until both are measured."""
        if self.call is None or self.save is None:
            return None
        return (IN_FLIGHT + 1) * self.call + self.save

    def fits(self) -> bool:
        """Return whether a save fits into the grace period; True until it is known."""
        return (self.needed or 0.0) <= self.seconds


class GracePeriod(Hook):
    """Hook that keeps the time of a call, and warns once if a save would not fit.

    Args:
        budget: takes the time of a call.
        every: steps between two checks.
        call: returns the seconds of a call of the step; None: not yet measured.
        cadence: how often a checkpoint is saved: `500 steps`.
        log: takes the warning.
    """

    def __init__(
        self,
        budget: GraceBudget,
        *,
        every: int,
        call: Callable[[], float | None],
        cadence: str,
        log: Callable[[str], None],
    ):
        self.every, self._budget, self._cadence, self._log = every, budget, cadence, log
        self._call, self._warned = call, False

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Measure a call, and warn once if the grace period is too short."""
        self._budget.call = self._call()
        if self._warned or self._budget.fits():
            return
        self._warned = True
        needed = self._budget.needed or 0.0
        self._log(
            f"checkpoint.grace: {format_duration(self._budget.seconds)} are too short for the "
            f"steps in flight and a save, about {format_duration(needed)}. Asked to end, this run "
            f"ends at once and later resumes from the last checkpoint, saved every "
            f"{self._cadence}. Lower checkpoint.every, or set checkpoint.grace={needed * 1.5:.0f} "
            f"if the scheduler waits that long before it kills the run."
        )
