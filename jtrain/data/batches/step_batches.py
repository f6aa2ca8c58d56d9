"""The batches that a run reads: without those it skips, stacked for each call, in own memory."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from jtrain.errors import DataError

ALIGNMENT = 64  # bytes: XLA:CPU takes memory that begins at a multiple without a copy
LARGE = 1 << 20  # bytes: in 100 KB, alignment costs 7 us and the copy 4 us


def copy_writable(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with a copy of each numpy array that is not read-only."""

    def own(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or _is_constant(x):
            return x
        return aligned_copy(x) if x.nbytes >= LARGE else x.copy()

    return {name: own(x) for name, x in batch.items()}


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Return a copy whose memory begins at a multiple of `ALIGNMENT`."""
    copy = _align(np.empty, array.shape, array.dtype)
    copy[...] = array
    return copy


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros whose memory begins at a multiple of `ALIGNMENT`.

    Large memory costs nothing where it is neither read nor written.
    """
    return _align(np.zeros, shape, dtype)


def _align(
    make: Callable[[int, type], np.ndarray], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = make(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _is_constant(array: np.ndarray) -> bool:
    """Return whether numpy refuses to write to the memory of an array."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        memory = memory.base
    return True


@runtime_checkable
class StepBatches(Protocol):
    """A batch as a function of the step."""

    def __getitem__(self, step: int, /) -> Mapping[str, Any]: ...


@runtime_checkable
class StackedReader(StepBatches, Protocol):
    """Batches of which several are read at once."""

    def read_stacked(self, step: int, count: int, /) -> Mapping[str, Any] | None:
        """Return the batches of `count` steps, stacked k b ...; None to read them one by one."""
        ...


@runtime_checkable
class ResumableBatches(Protocol):
    """Batches whose state a checkpoint saves, and from which a run resumes.

    The state is the same in each process; or it has a mapping `shares`, which is merged over all
    processes.
    """

    def state(self, step: int) -> Mapping[str, Any]:
        """Return JSON from which `restore` resumes at a step; thread-safe, at any read position."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Resume from a state."""
        ...


def read_at_once(batches: StepBatches, first: int, count: int) -> Mapping[str, Any] | None:
    """Return `batches.read_stacked(first, count)`; None where batches are to be read one by one.

    So are those of a subclass that overrides `__getitem__` alone: the method that it inherits does
    not have its change.
    """
    own = next(k for k in type(batches).__mro__ if {"read_stacked", "__getitem__"} & vars(k).keys())
    if "read_stacked" not in vars(own) or not isinstance(batches, StackedReader):
        return None
    return batches.read_stacked(first, count)


class StackedBatches:
    """`calls[i]`: the batch of step i, or the batches of `steps` steps from `i * steps` on: k b ...

    A reader may fill one buffer again for each batch: the arrays are read-only or copies.
    With `stacked` the batch of one step has the leading dim, too. Arrays that are the same
    read-only object in every batch (`row`, `mask`) stay one object, so that they are put on the
    devices once.
    """

    def __init__(self, batches: StepBatches, steps: int = 1, *, stacked: bool = False):
        self._batches, self._steps, self._stacked = batches, steps, stacked or steps > 1
        self._same: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def __getitem__(self, call: int, /) -> Mapping[str, Any]:
        if not self._stacked:
            return copy_writable(self._batches[call])
        return self.read(call * self._steps, self._steps)

    def read(self, first: int, count: int) -> Mapping[str, Any]:
        """Return the batches of `count` steps from step `first` on, stacked: k b ..."""
        if (stacked := read_at_once(self._batches, first, count)) is not None:
            return copy_writable(stacked)
        batches = [copy_writable(self._batches[first + i]) for i in range(count)]
        names = batches[0].keys()
        if odd := next((i for i, batch in enumerate(batches) if batch.keys() != names), 0):
            raise DataError(
                f"The batches of a call need the same arrays, and step {first + odd} has "
                f"{', '.join(sorted(batches[odd]))} where step {first} has "
                f"{', '.join(sorted(names))}. Give each batch all of them."
            )
        return {name: self._stack(name, [b[name] for b in batches]) for name in names}

    def _stack(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        first_array = arrays[0]
        if any(array is not first_array for array in arrays) or first_array.flags.writeable:
            return np.stack(arrays)
        cached = self._same.get(name)
        if cached is None or cached[0] is not first_array or len(cached[1]) != len(arrays):
            stacked = np.stack(arrays)
            stacked.setflags(write=False)
            self._same[name] = cached = first_array, stacked
        return cached[1]  # not self._same[name]: another thread may have stored another mask


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

    Args:
        shift: what leads from the number of a batch in the run to that in `batches`.
    """

    def __init__(self, batches: StepBatches, windows: Iterable[Window] = (), *, shift: int = 0):
        self._batches, self.windows, self._shift = batches, merge_windows(windows), shift

    def __getitem__(self, step: int, /) -> Mapping[str, Any]:
        return self._batches[self.number(step) + self._shift]

    def indices(self, step: int) -> np.ndarray | None:
        """Return the rows of the data set that a step takes; None where they have no numbers."""
        indices = getattr(self._batches, "indices", None)
        return None if indices is None else indices(self.number(step) + self._shift)

    def number(self, step: int) -> int:
        """Return the number of a step's batch."""
        return find_batch(step, self.windows)

    def read_stacked(self, step: int, count: int) -> Mapping[str, Any] | None:
        """Return the batches of `count` steps, stacked; None if they cannot be read at once."""
        first, last = self.number(step), self.number(step + count - 1)
        at = first + self._shift
        return read_at_once(self._batches, at, count) if last - first < count else None

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the state to save at a step; empty if the batches are functions of the step."""
        batches, number = self._batches, self.number(step) + self._shift
        return batches.state(number) if isinstance(batches, ResumableBatches) else {}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Resume from the state of a checkpoint.

        Raises:
            DataError: if the state belongs to other batches.
        """
        if state and isinstance(self._batches, ResumableBatches):
            self._batches.restore(state)
