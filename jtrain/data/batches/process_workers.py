"""Batches read by several processes, in order; a worker imports this module, and no config."""

import contextlib
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # noqa: TID251  (over pipes of this process)
import numpy as np

from jtrain.data.batches.prefetch import ENDS, ThreadWorkers
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

    def __init__(
        self,
        get: Callable[[int], Any],
        workers: int,
        *,
        start: int,
        stop: int | None,
        ahead: int = 2,
    ):
        payload = serialize(get, workers)
        self._same: dict[tuple[str, bytes], np.ndarray] = {}
        # Start the tracker now: a later start would unblock the signals that are blocked here.
        resource_tracker.ensure_running()
        # A worker inherits this thread's signal mask: Ctrl-C is for the run, not for workers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
        try:
            self._workers = [_Worker(payload, start + i, stop, workers) for i in range(workers)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gets = [worker.receive for worker in self._workers]
        super().__init__(gets, start=start, stop=stop, ahead=ahead)

    def __call__(self, step: int, /) -> Any:
        """Return the batch of the next step."""
        return {name: self._intern(name, array) for name, array in super().__call__(step).items()}

    def close(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            worker.process.kill()
        super().close()
        for worker in self._workers:
            worker.process.join(ENDS)
            worker.pipe.close()

    def _intern(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the array; for equal `row` and `mask` always the same read-only object."""
        if name not in ("row", "mask"):
            return array
        array.setflags(write=False)
        return self._same.setdefault((name, array.tobytes()), array)


class _Worker:
    """A process that reads every `workers`-th step from `first` on."""

    def __init__(self, get: bytes, first: int, stop: int | None, workers: int):
        spawned = multiprocessing.get_context("spawn")
        self.pipe, other = spawned.Pipe()
        self._get, self._workers = get, workers
        self.process = spawned.Process(
            target=run_worker, args=(other, first, stop, workers), daemon=True, name="reads-batches"
        )
        self.process.start()
        other.close()  # the worker has the only one left: the pipe closes with it

    def receive(self, step: int) -> dict[str, np.ndarray]:
        """Return the next batch that the process sends, that of `step`."""
        try:
            if self._get:  # sent by this thread, as the process may still import its modules
                self.pipe.send_bytes(self._get)
                self._get = b""
            found = self.pipe.recv()
            if isinstance(found, list):
                batch = {name: np.empty(shape, dtype) for name, dtype, shape in found}
                for array in batch.values():
                    self.pipe.recv_bytes_into(_bytes(array))
                return batch
        except (EOFError, OSError):
            raise self._death_error(step) from None
        error, trace = found
        error.add_note(f"In a worker process:\n{trace}")
        raise error

    def _death_error(self, step: int) -> PeerError:
        self.process.join(ENDS)
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({signal_name(-code)})"
        return PeerError(
            f"workers.count={self._workers} processes read batches, and one of them, process "
            f"{self.process.pid}, {how} before it sent the batch of step {step}. If the system's "
            f"log says that memory ran out, lower workers.count, workers.ahead or batch; then give "
            f"the same command again, which resumes from the newest checkpoint."
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
    sends = f"workers.kind=processes sends the data to each of {workers} workers, and it"
    try:
        _Pickler(file).dump(get)
    except Exception as error:
        raise DataError(
            f"{sends} cannot be sent ({type(error).__name__}: {error}). Set workers.kind=threads, "
            f"or give the source a method __reduce__ that reopens it."
        ) from error
    if (size := file.getbuffer().nbytes) > LARGEST:
        raise DataError(
            f"{sends} takes {format_bytes(size)} in memory; at most {format_bytes(LARGEST)} are "
            f"sent. Set workers.kind=threads, which share it, or read it from files."
        )
    return file.getvalue()


def run_worker(pipe: Connection, first: int, stop: int | None, every: int) -> None:
    """Send the batches of some steps, then wait for the end; the body of a worker process.

    A batch is sent as a list of the names, types and shapes of its arrays, and then the bytes of
    each array; an error in its place as a tuple of itself and the traceback here.

    Args:
        pipe: gives the pickled function that reads a batch; sending waits until it has room.
        first: the first step, after which every `every`-th below `stop` is read.
    """
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    steps = itertools.count(first, every) if stop is None else range(first, stop, every)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has closed the pipe
        payload, read = pipe.recv_bytes(), None
        for step in steps:
            try:
                read = read or pickle.loads(payload)  # noqa: S301
                batch = {name: np.asarray(array) for name, array in read(step).items()}
            except BaseException as error:  # also SystemExit, which the parent raises at its step
                pipe.send((_sendable(error), traceback.format_exc()))
            else:
                pipe.send([(name, array.dtype, array.shape) for name, array in batch.items()])
                for data in map(_bytes, batch.values()):
                    pipe.send_bytes(data)
    threading.Event().wait()  # only the parent ends a worker: an exit counts as a death


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()  # waits on a pipe, which the system closes when the parent ends
        os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or a RuntimeError with its text if it cannot be pickled and restored."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
