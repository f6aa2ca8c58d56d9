"""Batches read by several processes, in order."""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import numpy as np

from jtrain.data.batches.prefetch import ENDS, ThreadWorkers, worker_steps
from jtrain.errors import DataError, PeerError
from jtrain.io.formatting import format_bytes, signal_name

LARGEST = 1 << 29  # bytes that may be copied to each worker
PARENT_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # handled by the run


class ProcessWorkers(ThreadWorkers):
    """A reader like `ThreadWorkers`, by processes; a thread for each receives what it sends.

    The only resource that a worker shares with this process is a pipe, which the system removes
    when either process ends. So workers can be killed at any time, and nothing is left behind
    however this process ends. (Grain's own processes share named memory and semaphores:
    docs/decisions.md.) Workers ignore the signals that a run handles. Workers are spawned: a
    script that starts them needs `if __name__ == "__main__":`.

    Raises:
        DataError: if `get` cannot be sent to another process, or is larger than `LARGEST`.
        PeerError: if a worker died, at the step of the batch that it was reading.
    """

    name = "receive-batches"

    def __init__(
        self,
        get: Callable[[int], Any],
        *,
        start: int,
        stop: int | None,
        workers: int,
        ahead: int = 2,
    ):
        payload = serialize(get, workers)
        self._same: dict[tuple[str, bytes], np.ndarray] = {}
        # Start the tracker now: a later start would unblock the signals that `_Worker` blocks.
        resource_tracker.ensure_running()
        self._workers = [
            _Worker(payload, worker_steps(start + i, stop, workers), workers)
            for i in range(workers)
        ]
        self._start_threads([worker.receive for worker in self._workers], start, stop, ahead)

    def __call__(self, step: int, /) -> Any:
        """Return the batch of the next step."""
        return {name: self._intern(name, array) for name, array in super().__call__(step).items()}

    def close(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            worker.kill()
        super().close()
        for worker in self._workers:
            worker.join()

    def _intern(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the array; for equal `row` and `mask` always the same read-only object."""
        if name not in ("row", "mask"):
            return array
        array.setflags(write=False)
        return self._same.setdefault((name, array.tobytes()), array)


class _Worker:
    """A process, started by the thread that receives its first batch."""

    def __init__(self, get: bytes, steps: Iterable[int], workers: int):
        spawned = multiprocessing.get_context("spawn")
        self._source, self._sink = spawned.Pipe(duplex=False)
        self._process: BaseProcess = spawned.Process(
            target=run_worker, args=(self._sink, get, steps), daemon=True, name="reads-batches"
        )
        self._workers = workers
        self._starting, self._killed = threading.Lock(), False

    def receive(self, step: int) -> dict[str, np.ndarray]:
        """Return the next batch that the process sends, that of `step`."""
        try:
            if self._process.pid is None:
                self._start()
            batch = _receive(self._source)
        except (EOFError, OSError):
            raise self._death_error(step) from None
        if isinstance(batch, WorkerFailure):
            batch.error.add_note(f"In a worker process:\n{batch.trace}")
            raise batch.error
        return batch

    def kill(self) -> None:
        """Kill the process; a start that is under way is waited for."""
        waited = self._starting.acquire(timeout=ENDS)
        self._killed = True
        if self._process.pid is not None:
            self._process.kill()
        if waited:
            self._starting.release()

    def join(self) -> None:
        """Wait until the process has ended, and close the pipe."""
        if self._process.pid is not None:
            self._process.join(ENDS)
        self._source.close()
        self._sink.close()

    def _start(self) -> None:
        # The process inherits this thread's signal mask: Ctrl-C is for the run, not for workers.
        signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
        with self._starting:
            if not self._killed:
                self._process.start()
            self._sink.close()  # the worker has the only one left: the pipe closes with it
        if self._killed and self._process.pid is not None:  # `kill` did not wait so long
            self._process.kill()

    def _death_error(self, step: int) -> PeerError:
        process = self._process
        if process.pid is not None:
            process.join(ENDS)
        return PeerError(
            f"workers.count={self._workers} processes read batches, and one of them, process "
            f"{process.pid}, {_describe_exit(process.exitcode)} before it sent the "
            f"batch of step {step}. If the system's log says that memory ran out, lower "
            "workers.count, workers.ahead or batch; then give the same command again, which "
            "resumes from the newest checkpoint."
        )


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
            f"{format_bytes(size)} in memory; at most {format_bytes(LARGEST)} are sent. Set "
            f"workers.kind=threads, which share it, or read it from files."
        )
    return file.getvalue()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal_name(-code)})"
    return f"ended with exit code {code}"


@dataclass(frozen=True)
class WorkerFailure:
    """An error that a worker sends in place of a batch."""

    error: BaseException
    trace: str
    """The traceback in the worker."""


def run_worker(sink: Connection, get: bytes, steps: Iterable[int]) -> None:
    """Send the batches of some steps, then wait for the end; the body of a worker process.

    A batch is sent as the names, types and shapes of its arrays, and then the bytes of each array.

    Args:
        sink: the sending end of a pipe. Sending waits until the pipe has room.
        get: the pickled function that reads the batch of a step.
    """
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    read = None
    with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
        for step in steps:
            try:
                read = read or pickle.loads(get)
                batch = {name: np.asarray(array) for name, array in read(step).items()}
            except BaseException as error:  # also SystemExit, which the parent raises at its step
                sink.send(WorkerFailure(_sendable(error), traceback.format_exc()))
            else:
                sink.send([(name, array.dtype, array.shape) for name, array in batch.items()])
                for array in batch.values():
                    if array.nbytes:
                        sink.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        threading.Event().wait()  # only the parent ends a worker: an exit counts as a death


def _receive(source: Connection) -> Any:
    """Receive a batch from `run_worker`: arrays by name, or `WorkerFailure`.

    Raises:
        EOFError: if the worker ended.
    """
    shapes = source.recv()
    if isinstance(shapes, WorkerFailure):
        return shapes
    batch = {name: np.empty(shape, dtype) for name, dtype, shape in shapes}
    for array in batch.values():
        if array.nbytes:
            source.recv_bytes_into(array.reshape(-1).view(np.uint8).data)
    return batch


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()  # waits on a pipe, which the system closes when the parent ends
        os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or a RuntimeError with its text if it cannot be pickled and restored."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
