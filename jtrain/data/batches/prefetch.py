"""Prefetching by threads: one if reading is slow enough to pay for it, or as many as configured."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from jtrain.errors import DataError

T = TypeVar("T")
DEPTH = 2  # batches that the thread of `ReadAhead` prefetches
TRIAL = 8  # reads between two decisions whether reading is slow
QUICK = 64  # reads of a thread between two decisions whether it is of use
ENDS = 10.0  # seconds that a worker may take to end


class ReadAhead(Generic[T]):
    """An iterator over `get(step)` for `start ... stop - 1`, in order; endless if stop is None.

    Handing a batch from thread to thread costs about as much as reading a small one (tens of
    microseconds; benchmarks/input_pipeline.py), so steps are read inline until more than half of
    `TRIAL` reads took longer than `slow` seconds. Then a thread prefetches at most `DEPTH` batches,
    until fewer than an eighth of `QUICK` reads did: a moment in which other programs had the cores
    decides nothing. An error in `get` is raised here, at its step, with its traceback.

    ```python
    with ReadAhead(batches.__getitem__, start=0, stop=100) as ahead:
        for batch in ahead: ...
    print(ahead.waited)
    ```
    """

    def __init__(
        self,
        get: Callable[[int], T],
        *,
        start: int,
        stop: int | None,
        slow: float = 200e-6,
        after: Callable[[int], int] = lambda step: step + 1,
        close: Callable[[], None] = lambda: None,
    ):
        """Read `start`, `after(start)`, ... below `stop`.

        Call `close` once, after the last read, to close what `get` reads from."""
        self.waited = 0.0
        """Total seconds in which the caller waited for data."""
        self._get, self._step, self._stop, self._after = get, start, stop, after
        self._pace = _Pace(slow, TRIAL, TRIAL // 2 + 1)
        self._thread: ReaderThread[T] | None = None
        self._close = close

    def __iter__(self) -> "ReadAhead[T]":
        return self

    def __next__(self) -> T:
        if self._stop is not None and self._step >= self._stop:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            value = self._read()
        except BaseException:
            self._stop = self._step  # like a generator that raised, this one ends
            self.close()
            raise
        seconds = time.perf_counter() - began
        self.waited += seconds
        self._step = self._after(self._step)
        if self._thread is None and self._pace.is_slow(seconds):
            steps = self._step, self._stop, self._after
            values = _read_while_slow(self._get, *steps, self._pace.slow)
            self._thread = ReaderThread(values, DEPTH)
        return value

    def close(self) -> None:
        """Stop the thread after its current read; wait at most a second for that."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._stop = self._step
        close, self._close = self._close, lambda: None
        close()

    def __enter__(self) -> "ReadAhead[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> T:
        if self._thread is not None:
            try:
                return next(self._thread)
            except StopIteration:  # its reads were not slow
                self._thread = None
        return _read_step(self._get, self._step)


class ReaderThread(Generic[T]):
    """A thread that takes the values of an iterator, at most `ahead` before they are asked for.

    The thread has no reference to this object: one that is dropped ends its thread.
    """

    def __init__(self, values: Iterator[T], ahead: int, name: str = "read-ahead"):
        self._free, self._closed = threading.Semaphore(ahead), threading.Event()
        self._ready: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        work = values, self._free, self._closed, self._ready
        self._thread = threading.Thread(target=_take, args=work, name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        """Return the next value, or raise what the iterator raised."""
        value, error = self._ready.get()
        self._free.release()
        if error is not None:
            raise error
        return cast(T, value)

    def close(self, seconds: float = 1.0) -> None:
        """End the thread after its current value, and wait for its end."""
        self._end()
        self._ready.put((None, RuntimeError("closed while a batch was awaited")))
        self._thread.join(seconds)

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._closed.set()
        self._free.release()


def _take(
    values: Iterator[T],
    free: threading.Semaphore,
    closed: threading.Event,
    ready: "SimpleQueue[tuple[T | None, BaseException | None]]",
) -> None:
    while True:
        free.acquire()
        if closed.is_set():
            return
        try:
            ready.put((next(values), None))
        except BaseException as error:  # raised again by who asks for the value
            ready.put((None, error))
            return


class _Pace:
    """Whether reads are slow: at least `enough` of every `reads` of them took `slow` seconds."""

    def __init__(self, slow: float, reads: int, enough: int):
        self.slow, self._reads, self._enough = slow, reads, enough
        self._count = self._slow_count = 0

    def is_slow(self, seconds: float) -> bool | None:
        """Count a read; return None unless it is the last of `reads`."""
        self._count += 1
        self._slow_count += seconds > self.slow
        if self._count < self._reads:
            return None
        result = self._slow_count >= self._enough
        self._count = self._slow_count = 0
        return result


def _read_while_slow(
    get: Callable[[int], T], step: int, stop: int | None, after: Callable[[int], int], slow: float
) -> Iterator[T]:
    """Yield the values of the steps in order until `stop`, or until reads are not slow."""
    pace = _Pace(slow, QUICK, QUICK // 8)
    while stop is None or step < stop:
        began = time.perf_counter()
        value = _read_step(get, step)
        is_slow = pace.is_slow(time.perf_counter() - began)
        yield value
        if is_slow is False:
            return
        step = after(step)


def _read_step(get: Callable[[int], T], step: int) -> T:
    try:
        return get(step)
    except StopIteration as error:  # it would end the loop, which has no such end
        raise DataError(
            f"Every step has a batch, and reading on after step {step} raised StopIteration: the "
            f"data was read to its end. Begin it again there, or train for fewer steps."
        ) from error


class ThreadWorkers:
    """A reader of `get(start)`, `get(start + 1)`, ... in order, by several threads.

    Of n threads, thread i reads the steps `start + i`, `start + i + n`, ..., at most `ahead` of
    them in advance. An error in `get` is raised here, at its step, with its traceback.

    Args:
        gets: the function of each thread that reads the batch of a step.
        stop: None: the steps never end.
    """

    def __init__(
        self, gets: Sequence[Callable[[int], Any]], *, start: int, stop: int | None, ahead: int = 2
    ):
        self._next, every = start, len(gets)
        steps = [
            itertools.count(start + i, every) if stop is None else range(start + i, stop, every)
            for i in range(every)
        ]
        self._threads = [
            ReaderThread(map(get, of), ahead, "read-batches")
            for get, of in zip(gets, steps, strict=True)
        ]
        self._turns = itertools.cycle(self._threads)

    def __call__(self, step: int, /) -> Any:
        """Return the batch of the next step."""
        assert step == self._next, f"step {self._next} comes next, not {step}"
        self._next += 1
        return next(next(self._turns))

    def close(self) -> None:
        """Stop the threads, each after its current batch."""
        for thread in self._threads:
            thread.close(ENDS)
