"""What each call of a compiled step takes: one batch, or the batches of several steps at once."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class StepBatches(Protocol):
    """A batch as a function of the step; may have a faster `several(step, count)`, stacked.

    That may be None for some steps, which are then read one by one.
    """

    def __getitem__(self, step: int, /) -> Mapping[str, Any]: ...


@runtime_checkable
class ResumableBatches(Protocol):
    """Batches that go on with what a run kept of them.

    It is the same in each process; or it has a mapping `shares`, and those of all are one.
    """

    def state(self, step: int) -> Mapping[str, Any]:
        """JSON by which `restore` goes on at a step, whatever was read beyond it; on any thread."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Makes ready to go on from there."""
        ...


class StackedBatches:
    """`calls[i]`: the batch of step i, or those of `steps` steps from `i * steps` on: k b ...

    Arrays that are the same read-only object in every batch (`row`, `mask`) stay one object, so
    that they are put on the devices once.
    """

    def __init__(self, batches: StepBatches, steps: int = 1):
        self._batches, self._steps = batches, steps
        self._same: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def __getitem__(self, call: int, /) -> Mapping[str, Any]:
        if self._steps == 1:
            return self._batches[call]
        first = call * self._steps
        several = getattr(self._batches, "several", lambda first, count: None)
        if (stacked := several(first, self._steps)) is not None:
            return stacked
        batches = [self._batches[first + i] for i in range(self._steps)]
        return {name: self._stack(name, [b[name] for b in batches]) for name in batches[0]}

    def state(self, step: int) -> Mapping[str, Any]:
        """What a checkpoint of a step keeps of the batches; nothing where the step says it all."""
        return self._batches.state(step) if isinstance(self._batches, ResumableBatches) else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint kept.

        Raises:
            DataError: if the batches are others.
        """
        if state and isinstance(self._batches, ResumableBatches):
            self._batches.restore(state)

    def _stack(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        one = arrays[0]
        if any(array is not one for array in arrays) or one.flags.writeable:
            return np.stack(arrays)
        known = self._same.get(name)
        if known is None or known[0] is not one:
            stacked = np.stack(arrays)
            stacked.setflags(write=False)
            self._same[name] = known = one, stacked
        return known[1]  # not what lies there now: another thread may stack another mask
