"""Batches read by several processes, in order."""

import io
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import numpy as np

from jtrain.data.batches.worker_process import WorkerFailure, receive, work
from jtrain.errors import DataError, PeerError

LARGEST = 1 << 29  # bytes that may be copied to each worker
LOOK = 0.2  # seconds between two looks at whether the reader was closed
ENDS = 10.0  # seconds that a killed process may take to be gone
OF_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # signals that a run answers


class ProcessWorkers:
    """Call it with `start`, `start + 1`, ...: it returns `get(step)`, read by `workers` processes.

    Worker i reads the steps `start + i`, `start + i + workers`, ...; a thread for each of them
    receives at most `ahead` batches before they are asked for, and one more waits in the pipe.

    The workers share nothing with this process but a pipe each, which the system takes away with
    either end. So they can be killed at any time, and leave nothing behind however this process
    ends. (Grain's own processes share named memory and semaphores: docs/log.md, 2026-11-23.) They
    ignore the signals that a run answers. They are spawned: a script that starts them needs
    `if __name__ == "__main__":`.

    Raises:
        DataError: if `get` cannot be sent to another process, or is larger than `LARGEST`.
        PeerError: where a worker died, at the step whose batch it owes.
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
        self.payload = serialize(get, workers)
        """What each worker is given."""
        self._start, self._next = start, start
        self._same: dict[tuple[str, bytes], np.ndarray] = {}
        resource_tracker.ensure_running()  # begun later it would lift what `_Worker` blocks
        self._workers = [
            _Worker(self.payload, start + i, workers, stop, ahead) for i in range(workers)
        ]

    def __call__(self, step: int, /) -> Any:
        """Return the batch of the next step."""
        assert step == self._next, f"step {self._next} comes next, and {step} was asked for"
        worker = self._workers[(step - self._start) % len(self._workers)]
        batch = worker.received.get()
        if isinstance(batch, WorkerFailure):
            if batch.trace:
                batch.error.add_note(f"In a worker process:\n{batch.trace}")
            raise batch.error
        if batch is None:
            raise self._dead(worker, step)
        self._next += 1
        return {name: self._interned(name, array) for name, array in batch.items()}

    def close(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(ENDS)

    def _dead(self, worker: "_Worker", step: int) -> PeerError:
        worker.process.join(ENDS)
        return PeerError(
            f"workers.count={len(self._workers)} processes were to read batches, and process "
            f"{worker.process.pid}, one of them, {_ended(worker.process.exitcode)} before the "
            f"batch of step {step} came. Where the system's log says that memory ran out, lower "
            f"workers.count, workers.ahead or batch; then give the same command again, which goes "
            f"on from the newest checkpoint."
        )

    def _interned(self, name: str, array: np.ndarray) -> np.ndarray:
        """The array; of `row` and `mask` the same read-only object whenever they are the same."""
        if name not in ("row", "mask"):
            return array
        key = name, array.tobytes()
        if key not in self._same:
            array.setflags(write=False)
            self._same[key] = array
        return self._same[key]


class _Worker:
    """A process, and the thread that starts it and receives what it sends."""

    def __init__(self, get: bytes, first: int, every: int, stop: int | None, ahead: int):
        spawned = multiprocessing.get_context("spawn")
        self._source, self._sink = spawned.Pipe(duplex=False)
        self.received: queue.Queue[Any] = queue.Queue(ahead)
        """Batches, then None where the worker ended by itself."""
        work_of = (self._sink, get, first, every, stop)
        self.process: BaseProcess = spawned.Process(
            target=work, args=work_of, daemon=True, name=f"reads-from-{first}"
        )
        self._closed, self._started = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._receive, name="receive-batches", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Kill the process, and let the thread end."""
        self._closed.set()
        self._started.wait(ENDS)
        if self.process.pid is not None:
            self.process.kill()

    def join(self, seconds: float) -> None:
        """Wait until both are gone."""
        self._thread.join(seconds)
        if self.process.pid is not None:
            self.process.join(seconds)

    def _receive(self) -> None:
        # The process inherits this thread's mask: a Ctrl-C is for the run, not for its workers.
        signal.pthread_sigmask(signal.SIG_BLOCK, OF_PARENT)
        try:
            with self._source, self._sink:
                try:
                    self.process.start()
                finally:
                    self._started.set()
                self._sink.close()  # the worker's is the only one: the pipe ends with it
                while not self._closed.is_set():
                    self._put(receive(self._source))
        except (EOFError, OSError):
            self._put(None)
        except BaseException as error:  # raised again where a batch is asked for
            self._put(WorkerFailure(error, ""))

    def _put(self, batch: Any) -> None:
        while not self._closed.is_set():
            try:
                return self.received.put(batch, timeout=LOOK)
            except queue.Full:
                pass


class _Pickler(cloudpickle.Pickler):
    """Pickles what is mapped from a file as where it lies."""

    def reducer_override(self, obj: Any) -> Any:
        """As pickle asks for it."""
        if type(obj) is np.memmap and obj.flags.c_contiguous and obj.filename is not None:
            whole = obj
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            if type(whole) is np.memmap:
                place = whole.offset + obj.ctypes.data - whole.ctypes.data
                return np.memmap, (str(obj.filename), obj.dtype, "r", place, obj.shape)
        return super().reducer_override(obj)


def serialize(get: Callable[[int], Any], workers: int) -> bytes:
    """Return the function as bytes; arrays mapped from a file as the file's name and place.

    Raises:
        DataError: if it cannot be sent, or is larger than `LARGEST`.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(get)
    except Exception as error:
        raise DataError(
            f"workers.kind=processes sends the data to each of {workers} workers, and it cannot be "
            f"sent ({type(error).__name__}: {error}). Set workers.kind=threads, or give the source "
            f"a method __reduce__ that says how to open it again."
        ) from error
    size = file.getbuffer().nbytes
    if size > LARGEST:
        raise DataError(
            f"workers.kind=processes sends the data to each of {workers} workers, and it takes "
            f"{size / 1e6:,.0f} MB in memory; at most {LARGEST / 1e6:,.0f} MB are sent. Set "
            f"workers.kind=threads, which share it, or read it from files."
        )
    return file.getvalue()


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"
