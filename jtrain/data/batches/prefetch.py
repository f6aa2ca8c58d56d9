"""Prefetching for the training loop, if reading is slow enough to pay for a thread."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from jtrain.errors import DataError

T = TypeVar("T")
TRIAL = 8  # reads between two decisions whether reading is slow
QUICK = 64  # reads of a thread between two decisions whether it is of use


class _Failed(NamedTuple):
    error: BaseException


class _Ended(NamedTuple):
    """The thread has ended, since its reads were not slow."""


class ReadAhead(Generic[T]):
    """An iterator over `get(step)` for `start ... stop - 1`, in order; endless if stop is None.

    Handing a batch from thread to thread costs about as much as reading a small one (tens of
    microseconds; benchmarks/input_pipeline.py), so steps are read inline until more than half of
    `TRIAL` reads took longer than `slow` seconds. Then a thread prefetches at most `depth` batches,
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
        depth: int = 2,
        slow: float = 200e-6,
        after: Callable[[int], int] = lambda step: step + 1,
        close: Callable[[], None] = lambda: None,
    ):
        """Read `start`, `after(start)`, ... below `stop`.

        Call `close` once, after the last read, to close what `get` reads from."""
        assert depth > 0, "a prefetch queue holds at least one batch"
        self.waited = 0.0
        """Total seconds in which the caller waited for data."""
        self._get, self._step, self._stop, self._after = get, start, stop, after
        self._depth, self._slow = depth, slow
        self._reads = self._slow_reads = 0
        self._thread: _Reader[T] | None = None
        self._close: Callable[[], None] | None = close

    @property
    def threaded(self) -> bool:
        """True if a thread reads."""
        return self._thread is not None

    def __iter__(self) -> "ReadAhead[T]":
        return self

    def __next__(self) -> T:
        if self._stop is not None and self._step >= self._stop:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            value = self._thread.next() if self._thread else self._get(self._step)
            if isinstance(value, _Ended):
                self._thread, value = None, self._get(self._step)
        except BaseException as error:
            self._stop = self._step  # like a generator that raised, this one ends
            self.close()
            if isinstance(error, StopIteration):  # it would end the loop, which has no such end
                raise DataError(
                    f"Every step has a batch, and reading on after step {self._step} raised "
                    f"StopIteration: the data was read to its end. Begin it again there, or train "
                    f"for fewer steps."
                ) from error
            raise
        seconds = time.perf_counter() - began
        self.waited += seconds
        self._step = self._after(self._step)
        if self._thread is None:
            self._start_if_slow(seconds)
        return value

    def close(self) -> None:
        """Stop the thread after its current read; wait at most a second for that."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._stop = self._step
        if self._close is not None:
            close, self._close = self._close, None
            close()

    def __enter__(self) -> "ReadAhead[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if thread := getattr(self, "_thread", None):
            thread.closed.set()
            thread.free.release()

    def _start_if_slow(self, seconds: float) -> None:
        """Start the thread if most of the last `TRIAL` reads were slow."""
        self._reads += 1
        self._slow_reads += seconds > self._slow
        if self._reads == TRIAL:
            if self._slow_reads > TRIAL // 2:
                steps = self._step, self._stop, self._after
                self._thread = _Reader(self._get, *steps, self._depth, self._slow)
            self._reads = self._slow_reads = 0


class _Reader(Generic[T]):
    """A thread that prefetches at most `depth` steps.

    The thread has no reference to its `ReadAhead`, so an unfinished `ReadAhead` that is dropped is
    collected, and its `__del__` ends the thread.
    """

    def __init__(
        self,
        get: Callable[[int], T],
        start: int,
        stop: int | None,
        after: Callable[[int], int],
        depth: int,
        slow: float,
    ):
        self.free, self.closed = threading.Semaphore(depth), threading.Event()
        self._ready: SimpleQueue[T | _Failed | _Ended] = SimpleQueue()
        work = (get, start, stop, after, slow, self.free, self.closed, self._ready)
        self._thread = threading.Thread(target=_read, args=work, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> T | _Ended:
        value = self._ready.get()
        self.free.release()
        if isinstance(value, _Failed):
            raise value.error
        return value

    def close(self) -> None:
        self.closed.set()
        self.free.release()
        self._thread.join(timeout=1.0)


def _read(
    get: Callable[[int], T],
    step: int,
    stop: int | None,
    after: Callable[[int], int],
    slow: float,
    free: threading.Semaphore,
    closed: threading.Event,
    ready: "SimpleQueue[T | _Failed | _Ended]",
) -> None:
    """Read the steps in order until `stop` or `closed`, or until reads are not slow."""
    reads = slow_reads = 0
    while stop is None or step < stop:
        free.acquire()
        if closed.is_set():
            return
        began = time.perf_counter()
        try:
            ready.put(get(step))
        except BaseException as error:  # raised again in the loop, at its step
            ready.put(_Failed(error))
            return
        step = after(step)
        reads += 1
        slow_reads += time.perf_counter() - began > slow
        if reads == QUICK:
            if slow_reads < QUICK // 8:
                ready.put(_Ended())
                return
            reads = slow_reads = 0
