"""The body of a worker process, which reads batches, sends them, and ends with its parent."""

import contextlib
import os
import pickle
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


@dataclass(frozen=True)
class WorkerFailure:
    """An error that a worker sends in place of a batch."""

    error: BaseException
    trace: str
    """The traceback in the worker."""


def run_worker(to: Connection, get: bytes, first: int, every: int, stop: int | None) -> None:
    """Send the batches of steps `first`, `first + every`, ... below `stop`, then wait for the end.

    A batch is sent as the names, types and shapes of its arrays, and then the bytes of each array.

    Args:
        to: the sending end of a pipe. Sending waits until the pipe has room.
        get: the pickled function that reads the batch of a step.
    """
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    step, read = first, None
    with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
        while stop is None or step < stop:
            try:
                read = read or pickle.loads(get)
                batch = {name: np.asarray(array) for name, array in read(step).items()}
            except BaseException as error:  # also SystemExit, which the parent raises at its step
                to.send(WorkerFailure(_sendable(error), traceback.format_exc()))
            else:
                to.send([(name, array.dtype, array.shape) for name, array in batch.items()])
                for array in batch.values():
                    if array.nbytes:
                        to.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            step += every
        threading.Event().wait()  # only the parent ends a worker: an exit counts as a death


def receive(source: Connection) -> Any:
    """Receive a batch from `work`: arrays by name, or `WorkerFailure`.

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
