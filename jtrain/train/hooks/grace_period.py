"""Says when a run could not save its state in the time that it has to end in."""

from collections.abc import Callable, Mapping

from jtrain.core.loop import Hook
from jtrain.io.formatting import duration

IN_FLIGHT = 9  # calls that the devices may still have to do when a signal comes, its own with them


class GracePeriod(Hook):
    """Compares what a step and a save take with `checkpoint.grace`, once both were measured.

    Args:
        grace: seconds.
        every: steps between two looks.
        call: seconds that a call of the step takes; None: not yet measured.
        save: seconds that a save took; None likewise.
        kept: how often a checkpoint is made: `500 steps`.
        tell: takes the line that says so, once.
    """

    def __init__(
        self,
        grace: float,
        *,
        every: int,
        call: Callable[[], float | None],
        save: Callable[[], float | None],
        kept: str,
        tell: Callable[[str], None],
    ):
        self.every, self._grace, self._kept, self._tell = every, grace, kept, tell
        self._call, self._save, self._told = call, save, False

    def fits(self) -> bool:
        """Whether a run that is asked to end has time to save; True while nobody knows."""
        return (self._needs() or 0.0) <= self._grace

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Looks, and says it."""
        if self._told or self.fits():
            return
        self._told = True
        self._tell(
            f"checkpoint.grace: {duration(self._grace)} are too short for the steps in flight and "
            f"a save, about {duration(self._needs() or 0.0)}. Asked to end, this run ends at once, "
            f"and goes on from the checkpoint before: one is made every {self._kept}. Lower "
            f"checkpoint.every, or set checkpoint.grace={(self._needs() or 0.0) * 1.5:.0f} if who "
            f"ends it waits so long."
        )

    def _needs(self) -> float | None:
        call, save = self._call(), self._save()
        return None if call is None or save is None else IN_FLIGHT * call + save
