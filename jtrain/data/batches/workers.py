"""Workers that read batches in parallel: their config."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.prefetch import ThreadWorkers
from jtrain.data.batches.process_workers import ProcessWorkers
from jtrain.data.batches.step_batches import ResumableBatches
from jtrain.data.batches.stream import LoaderBatches
from jtrain.errors import DataError

Get: TypeAlias = Callable[[int], Mapping[str, Any]]


@configclass
class Workers:
    """Workers that read batches in parallel: their number and kind. The batches stay the same."""

    count: int = Field(default=0, ge=0, le=256)
    """Workers, each of which reads complete batches; 0: the training thread reads them itself, or
    one thread beside it if reading is slow."""
    kind: Literal["threads", "processes"] = "threads"
    """Threads suit code that releases Python's global lock: files, Pillow, numpy. Processes suit
    Python code of your own; each process has a copy of data in memory."""
    ahead: int = Field(default=2, ge=1)
    """Batches that each worker prefetches; they take host memory."""

    def build(
        self, get: Get, *, start: int, stop: int | None, processes: bool = True
    ) -> "ThreadWorkers | InlineReader":
        """Return a reader of `get(start)`, `get(start + 1)`, ... `get(stop - 1)`.

        Args:
            get: reads the batch of a step; called by several workers at once, in any order.
            stop: None: the steps never end.
            processes: whether processes are started; else the caller reads in their place. (An
                evaluation would end before they have started.)

        Raises:
            DataError: if `kind` is processes and `get` cannot be sent to another process.
        """
        if not self.count or (self.kind == "processes" and not processes):
            return InlineReader(get)
        if self.kind == "processes":
            return ProcessWorkers(get, self.count, start=start, stop=stop, ahead=self.ahead)
        return ThreadWorkers([get] * self.count, start=start, stop=stop, ahead=self.ahead)

    def check(self, batches: Any) -> None:
        """Raise DataError if several workers cannot read these batches."""
        if self.count and is_streamed(batches):
            raise DataError(
                f"workers.count={self.count} was configured, and these batches are streamed "
                f"({type(batches).__name__}): each batch follows from the batch before it, so one "
                f"reader must read them in order. Set workers.count=0, or read rows by index."
            )


def is_streamed(batches: Any) -> bool:
    """Return whether each batch follows from the batch before it and needs a single reader."""
    return isinstance(batches, ResumableBatches | LoaderBatches)


class InlineReader:
    """A reader without workers: the caller reads each batch when it is requested."""

    def __init__(self, get: Get):
        self._get = get

    def __call__(self, step: int, /) -> Mapping[str, Any]:
        """Return the batch of a step."""
        return self._get(step)

    def close(self) -> None:
        """Do nothing: there is no prefetching."""
