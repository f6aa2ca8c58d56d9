"""Batches by step without the batches that a run skips."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jtrain.data.batches.stacked import ResumableBatches, StepBatches, read_at_once

Window: TypeAlias = tuple[int, int]  # batches first .. stop - 1 are skipped, counted from 0


def merge_windows(windows: Iterable[Window]) -> tuple[Window, ...]:
    """Merge the windows into ascending windows that neither overlap nor touch."""
    joined: list[Window] = []
    for first, stop in sorted((first, stop) for first, stop in windows if first < stop):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((first, stop))
    return tuple(joined)


def find_batch(step: int, windows: Iterable[Window]) -> int:
    """Return the number of the batch of a step, both from 0; `windows` as `merged` returns them."""
    number = step
    for first, stop in windows:
        if number < first:
            break
        number += stop - first
    return number


class SkipBatches:
    """`batches[step]` without the batches in `windows`: the batches behind a window move up.

    A step's batch depends on the step and the windows alone. So a run that adds a window of later
    batches on its way takes the same steps as a run that had the window from the start.
    """

    def __init__(self, batches: StepBatches, windows: Iterable[Window] = ()):
        self._batches, self.windows = batches, merge_windows(windows)

    def __getitem__(self, step: int, /) -> Mapping[str, Any]:
        return self._batches[self.number(step)]

    def number(self, step: int) -> int:
        """Return the number of a step's batch."""
        return find_batch(step, self.windows)

    def read_stacked(self, step: int, count: int) -> Mapping[str, Any] | None:
        """Return the batches of `count` steps, stacked; None if they cannot be read at once."""
        first, last = self.number(step), self.number(step + count - 1)
        return read_at_once(self._batches, first, count) if last - first < count else None

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the state of the batches at a step; empty if they are functions of the step."""
        batches = self._batches
        return batches.state(self.number(step)) if isinstance(batches, ResumableBatches) else {}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Restore the state of the batches, if they have any."""
        if isinstance(self._batches, ResumableBatches):
            self._batches.restore(state)
