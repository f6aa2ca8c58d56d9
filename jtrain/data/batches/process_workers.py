"""Batches read by several processes, in order."""

import contextlib
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

from jtrain.data.batches.worker_process import WorkerFailure, receive, run_worker
from jtrain.errors import DataError, PeerError
from jtrain.io.formatting import signal_name

LARGEST = 1 << 29  # bytes that may be copied to each worker
POLL = 0.2  # seconds between two checks whether the reader was closed
ENDS = 10.0  # seconds that a killed process may take to exit
PARENT_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # handled by the run


class ProcessWorkers:
    """A reader of `get(start)`, `get(start + 1)`, ... in order, by `workers` processes.

    Worker i reads the steps `start + i`, `start + i + workers`, ...; a thread for each worker
    receives at most `ahead` batches in advance, and one more waits in the pipe.

    The only resource that a worker shares with this process is a pipe, which the system removes
    when either process ends. So workers can be killed at any time, and nothing is left behind
    however this process ends. (Grain's own processes share named memory and semaphores:
    docs/decisions.md.) Workers ignore the signals that a run handles. Workers are spawned: a
    script that starts them needs `if __name__ == "__main__":`.

    Raises:
        DataError: if `get` cannot be sent to another process, or is larger than `LARGEST`.
        PeerError: if a worker died, at the step of the batch that it was reading.
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
        """The pickled function that each worker receives."""
        self._start, self._next = start, start
        self._same: dict[tuple[str, bytes], np.ndarray] = {}
        # Start the tracker now: a later start would unblock the signals that `_Worker` blocks.
        resource_tracker.ensure_running()
        self._workers = [
            _Worker(self.payload, start + i, workers, stop, ahead) for i in range(workers)
        ]

    def __call__(self, step: int, /) -> Any:
        """Return the batch of the next step."""
        assert step == self._next, f"step {self._next} comes next, not {step}"
        worker = self._workers[(step - self._start) % len(self._workers)]
        batch = worker.received.get()
        if isinstance(batch, WorkerFailure):
            if batch.trace:
                batch.error.add_note(f"In a worker process:\n{batch.trace}")
            raise batch.error
        if batch is None:
            raise self._death_error(worker, step)
        self._next += 1
        return {name: self._intern(name, array) for name, array in batch.items()}

    def close(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(ENDS)

    def _death_error(self, worker: "_Worker", step: int) -> PeerError:
        worker.process.join(ENDS)
        return PeerError(
            f"workers.count={len(self._workers)} processes read batches, and one of them, process "
            f"{worker.process.pid}, {_describe_exit(worker.process.exitcode)} before it sent the "
            f"batch of step {step}. If the system's log says that memory ran out, lower "
            "workers.count, workers.ahead or batch; then give the same command again, which "
            "resumes from the newest checkpoint."
        )

    def _intern(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the array; for equal `row` and `mask` always the same read-only object."""
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
            target=run_worker, args=work_of, daemon=True, name=f"reads-from-{first}"
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
        """Wait until the thread and the process have ended."""
        self._thread.join(seconds)
        if self.process.pid is not None:
            self.process.join(seconds)

    def _receive(self) -> None:
        # The process inherits this thread's signal mask: Ctrl-C is for the run, not for workers.
        signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
        try:
            with self._source, self._sink:
                try:
                    self.process.start()
                finally:
                    self._started.set()
                self._sink.close()  # the worker has the only one left: the pipe closes with it
                if self._closed.is_set():  # `end` did not wait for so late a start
                    self.process.kill()
                while not self._closed.is_set():
                    self._put(receive(self._source))
        except (EOFError, OSError):
            self._put(None)
        except BaseException as error:  # raised again when a batch is requested
            self._put(WorkerFailure(error, ""))

        finally:
            # Wake up a thread that still awaits a batch; nobody waits in front of a full queue.
            closed = WorkerFailure(RuntimeError("closed while a batch was awaited"), "")
            with contextlib.suppress(queue.Full):
                self.received.put_nowait(closed)

    def _put(self, batch: Any) -> None:
        while not self._closed.is_set():
            try:
                return self.received.put(batch, timeout=POLL)
            except queue.Full:
                pass


class _Pickler(cloudpickle.Pickler):
    """A pickler that stores an array mapped from a file as the file's name and offset."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the mapping's file and offset; for other objects, what cloudpickle returns."""
        if type(obj) is np.memmap and obj.flags.c_contiguous and obj.filename is not None:
            mapping = obj
            while isinstance(mapping.base, np.ndarray):
                mapping = mapping.base
            if type(mapping) is np.memmap:
                offset = mapping.offset + obj.ctypes.data - mapping.ctypes.data
                return np.memmap, (str(obj.filename), obj.dtype, "r", offset, obj.shape)
        return super().reducer_override(obj)


def serialize(get: Callable[[int], Any], workers: int) -> bytes:
    """Return the function as bytes; arrays mapped from a file as the file's name and offset.

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
            f"a method __reduce__ that reopens it."
        ) from error
    size = file.getbuffer().nbytes
    if size > LARGEST:
        raise DataError(
            f"workers.kind=processes sends the data to each of {workers} workers, and it takes "
            f"{size / 1e6:,.0f} MB in memory; at most {LARGEST / 1e6:,.0f} MB are sent. Set "
            f"workers.kind=threads, which share it, or read it from files."
        )
    return file.getvalue()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal_name(-code)})"
    return f"ended with exit code {code}"
