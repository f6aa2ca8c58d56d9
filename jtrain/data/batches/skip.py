"""Batches by step of which some are left out, as if they were not there."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jtrain.data.batches.stacked import ResumableBatches, StepBatches

Window: TypeAlias = tuple[int, int]  # batches first .. stop - 1, counted from 0


def merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    """The same batches as ascending windows that neither meet nor touch."""
    found: list[Window] = []
    for first, stop in sorted((first, stop) for first, stop in windows if first < stop):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((first, stop))
    return tuple(found)


def number_of(step: int, windows: Iterable[Window]) -> int:
    """The number of the batch that a step takes, both from 0; `windows` as `merged` gives them."""
    number = step
    for first, stop in windows:
        if number < first:
            break
        number += stop - first
    return number


class SkipBatches:
    """`batches[step]`, the batches in `windows` not counted: the next ones move up.

    A step's batch depends on the step and the windows alone, so a run that learns of a window on
    its way goes on as one that was given it at its beginning, if the window lies ahead.
    """

    def __init__(self, batches: StepBatches, windows: Iterable[Window] = ()):
        self._batches, self.windows = batches, merged(windows)

    def __getitem__(self, step: int, /) -> Mapping[str, Any]:
        return self._batches[self.number(step)]

    def number(self, step: int) -> int:
        """The number of a step's batch."""
        return number_of(step, self.windows)

    def several(self, step: int, count: int) -> Mapping[str, Any] | None:
        """Those of `count` steps, stacked; None where they cannot be read at once."""
        several = getattr(self._batches, "several", None)
        first, last = self.number(step), self.number(step + count - 1)
        if several is None or last - first > count - 1:
            return None
        return several(first, count)

    def state(self, step: int) -> Mapping[str, Any]:
        """As `ResumableBatches`; nothing where the step says it all."""
        found = self._batches
        return found.state(self.number(step)) if isinstance(found, ResumableBatches) else {}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """As `ResumableBatches`."""
        if isinstance(self._batches, ResumableBatches):
            self._batches.restore(state)
