"""Grace period: a warning if a run that is asked to end would have no time to save."""

from collections.abc import Callable, Mapping

from jtrain.core.loop import Hook
from jtrain.io.formatting import format_duration

IN_FLIGHT = 9  # calls that may still be running on the devices when a signal comes


class GracePeriod(Hook):
    """Hook that compares the time of a step and a save, once measured, with `checkpoint.grace`.

    Args:
        grace: seconds.
        every: steps between two checks.
        call: seconds that a call of the step takes; None: not yet measured.
        save: seconds that a save took; None: not yet measured.
        cadence: how often a checkpoint is saved: `500 steps`.
        log: takes the warning, once.
    """

    def __init__(
        self,
        grace: float,
        *,
        every: int,
        call: Callable[[], float | None],
        save: Callable[[], float | None],
        cadence: str,
        log: Callable[[str], None],
    ):
        self.every, self._grace, self._cadence, self._log = every, grace, cadence, log
        self._call, self._save, self._warned = call, save, False

    def fits(self) -> bool:
        """Return whether the grace period is enough to save; True until both times are measured."""
        return (self._needed() or 0.0) <= self._grace

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Warn once if the grace period is too short."""
        if self._warned or self.fits():
            return
        self._warned = True
        self._log(
            f"checkpoint.grace: {format_duration(self._grace)} are too short for the steps in "
            f"flight and a save, about {format_duration(self._needed() or 0.0)}. Asked to end, "
            f"this run ends at once and later resumes from the last checkpoint, saved every "
            f"{self._cadence}. Lower checkpoint.every, or set checkpoint.grace="
            f"{(self._needed() or 0.0) * 1.5:.0f} if the "
            f"scheduler waits that long before it kills the run."
        )

    def _needed(self) -> float | None:
        call, save = self._call(), self._save()
        return None if call is None or save is None else IN_FLIGHT * call + save
