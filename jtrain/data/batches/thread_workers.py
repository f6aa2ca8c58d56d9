"""Batches read by several threads, in order, through Grain."""

from collections.abc import Callable, Iterator
from typing import Any

ENDLESS = 1 << 48  # steps, if a run has no last step


class ThreadWorkers:
    """A reader of `get(start)`, `get(start + 1)`, ... in order, by `workers` threads.

    At most `workers * ahead` batches are prefetched. An error in `get` is raised here, at its step,
    with its traceback.
    """

    def __init__(
        self,
        get: Callable[[int], Any],
        *,
        start: int,
        stop: int | None,
        workers: int,
        ahead: int = 2,
    ):
        import grain  # imports JAX

        steps = grain.MapDataset.range(start, start + ENDLESS if stop is None else stop)
        options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers * ahead)
        self._next = start
        self._batches: Iterator[Any] = iter(steps.map(get).to_iter_dataset(options))

    def __call__(self, step: int, /) -> Any:
        """Return the batch of the next step."""
        assert step == self._next, f"step {self._next} comes next, not {step}"
        self._next += 1
        return next(self._batches)

    def close(self) -> None:
        """Stop the threads, each after its current batch."""
        self._batches.close()  # pyright: ignore[reportAttributeAccessIssue]
