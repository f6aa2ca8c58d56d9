"""The values of reading by several workers at once."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.loader_batches import LoaderBatches
from jtrain.data.batches.stacked import ResumableBatches
from jtrain.errors import DataError

Get: TypeAlias = Callable[[int], Mapping[str, Any]]


@runtime_checkable
class BatchReader(Protocol):
    """Batches of consecutive steps, which may be read ahead of the caller."""

    def __call__(self, step: int, /) -> Mapping[str, Any]:
        """Return the batch of a step; steps are asked for in order, from the first."""
        ...

    def close(self) -> None:
        """Stop reading; nothing may be asked for afterwards."""
        ...


@configclass
class Workers:
    """How many batches are read at once, and by what. The workers change no batch."""

    count: int = Field(default=0, ge=0, le=256)
    """Workers, each of which reads whole batches; 0: the thread that trains reads them itself, or
    one thread beside it where reading is slow."""
    kind: Literal["threads", "processes"] = "threads"
    """Threads suit what releases the lock of Python: files, Pillow, numpy. Processes suit Python
    code of your own; each has a copy of what lies in memory."""
    ahead: int = Field(default=2, ge=1)
    """Batches that each worker reads ahead of the step that trains; they lie in the memory of the
    host."""

    def build(self, get: Get, *, start: int, stop: int | None) -> BatchReader:
        """Return a reader of `get(start)`, `get(start + 1)`, ... `get(stop - 1)`.

        Args:
            get: the batch of a step; called by several workers at once, in any order.
            stop: None: the steps never end.

        Raises:
            DataError: if `kind` is processes and `get` cannot be sent to another process.
        """
        if not self.count or self.kind == "threads":
            return self.build_threads(get, start=start, stop=stop)
        from jtrain.data.batches.process_workers import ProcessWorkers  # imports Grain

        return ProcessWorkers(get, start=start, stop=stop, workers=self.count, ahead=self.ahead)

    def build_threads(self, get: Get, *, start: int, stop: int | None) -> BatchReader:
        """Return the same, read by threads if `kind` is threads, else by the caller.

        For an evaluation, which is over before processes have begun.
        """
        if not self.count or self.kind != "threads":
            return InlineReader(get)
        from jtrain.data.batches.thread_workers import ThreadWorkers

        return ThreadWorkers(get, start=start, stop=stop, workers=self.count, ahead=self.ahead)

    def check(self, batches: Any) -> None:
        """Raise DataError if several workers cannot read these batches."""
        if self.count and streamed(batches):
            raise DataError(
                f"workers.count={self.count} was asked for, and these batches are streamed "
                f"({type(batches).__name__}): each follows from the one before it, so one reader "
                f"must read them in order. Set workers.count=0, or read rows by index."
            )


def streamed(batches: Any) -> bool:
    """Whether each batch follows from the one before it, so that one reader must read them all."""
    return isinstance(batches, ResumableBatches | LoaderBatches)


class InlineReader:
    """A reader without workers: the caller reads each batch when it asks for it."""

    def __init__(self, get: Get):
        self._get = get

    def __call__(self, step: int, /) -> Mapping[str, Any]:
        """Return the batch of a step."""
        return self._get(step)

    def close(self) -> None:
        """Do nothing: nothing is read ahead."""
