"""Array storage: arrays to a directory and back; the only module that uses Orbax.

It uses the older interface of Orbax, `AsyncCheckpointer` over `PyTreeCheckpointHandler`: the newer
one is still `experimental`, and its functions were renamed in 0.12.0. The step manager of Orbax is
not used: retention, listing and commits are ours (layout.py), since the step manager lists steps
whose background write failed, deletes old steps in place, and reports a failure one save late.

Compression is off: random normal float32 shrinks by 8 % and takes 1.5 to 2 times as long (200 MB).
"""

import contextlib
import functools
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import seal
from jtrain.core.types import Leaf
from jtrain.io.disk_errors import attempt, system_error, unreachable_error
from jtrain.io.regular_files import FACTS

# Milliseconds in which a process must read and seal what it wrote.
BARRIER_TIMEOUT = 12 * 3600 * 1000


class UnreadableError(Exception):
    """Fault of stored arrays, in one line."""


def import_orbax() -> None:
    """Import Orbax, which takes a second; no thread starts."""
    import orbax.checkpoint  # noqa: F401


class ArrayWriter:
    """Writer of one table of arrays at a time; all processes call the same methods of theirs."""

    def __init__(self):
        import orbax.checkpoint as ocp

        _hide_failures()
        processes = _multiprocessing_options(ocp)
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=processes
        )
        self._args = ocp.args.PyTreeSave
        self._checkpointer = ocp.AsyncCheckpointer(handler, multiprocessing_options=processes)
        self._sync = ocp.multihost.get_barrier_sync_fn()

    def start(self, directory: Path, arrays: Mapping[str, Leaf]) -> None:
        """Copy the arrays, which may be donated afterwards, and write them in the background."""
        # Orbax refuses empty arrays.
        nonempty = {name: array for name, array in arrays.items() if array.size}
        self._checkpointer.save(directory, args=self._args(nonempty))

    def finish(self) -> None:
        """Wait until all processes have written their shards; raise what went wrong."""
        self._checkpointer.wait_until_finished()

    def barrier(self, name: str) -> None:
        """Wait for all processes; the death of one ends the wait by JAX's heartbeat."""
        self._sync(key=f"jtrain.checkpoint:{name}", timeout_ms=BARRIER_TIMEOUT)

    def close(self) -> None:
        """End the threads."""
        self._checkpointer.close()


def seal_own_folder(directory: Path, step: int) -> None:
    """Seal what this process wrote, if it is not the first, which seals all else."""
    own = directory / f"ocdbt.process_{jax.process_index()}"
    if jax.process_index() and own.is_dir():
        seal.seal(own, step)


def read(directory: Path, abstract: Mapping[str, Leaf], *, some: bool = False) -> dict[str, Leaf]:
    """Read the arrays in a directory, sharded like `abstract`; numpy for leaves without a sharding.

    `abstract` has the stored names and shapes, which is not checked here: all of them, or `some`.

    Raises:
        UnreadableError: if a file is missing or broken, or an array is missing.
        UnreachableError: if the system does not let a file be read. One process tries again first;
            of several, one alone may not.
    """
    read = functools.partial(_read, directory, abstract, some=some)
    try:
        return attempt(directory, read) if jax.process_count() == 1 else read()
    except OSError as error:
        raise unreachable_error(directory, error) from None


def _read(directory: Path, abstract: Mapping[str, Leaf], *, some: bool = False) -> dict[str, Leaf]:
    import orbax.checkpoint as ocp

    nonempty = {name: leaf for name, leaf in abstract.items() if leaf.size}
    processes = _multiprocessing_options(ocp)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    requests = {name: _restore_args(ocp, leaf) for name, leaf in nonempty.items()}
    args = ocp.args.PyTreeRestore(nonempty, restore_args=requests, partial_restore=some)
    found, problem, cause = {}, "", None
    with (
        _hide_task_errors(),
        ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer,
    ):
        try:
            found = checkpointer.restore(directory, args=args)
        except Exception as error:
            problem, cause = shorten_error(error), system_error(error)
        if problem:
            gc.collect()  # failed tasks log when they are collected: collect them here
    if not problem:  # with `some`, Orbax returns the request for missing arrays
        missing = [name for name in nonempty if not isinstance(found[name], np.ndarray | jax.Array)]
        problem = f"nothing is stored for {', '.join(missing)}" if missing else ""
    if cause is not None and not isinstance(cause, FACTS):
        raise cause
    if problem:
        raise UnreadableError(problem)
    return {name: found[name] if leaf.size else _empty(leaf) for name, leaf in abstract.items()}


def shorten_error(error: BaseException) -> str:
    """Describe an error in at most 200 characters: storage errors run to thousands."""
    text = " ".join(
        str(error).split(" [source locations")[0].split(" [tensorstore_spec")[0].split()
    )
    if len(text) > 200:
        text = f"{text[:60]} ... {text[-135:]}"
    return f"{type(error).__name__}: {text}"


def _multiprocessing_options(ocp: Any) -> Any:
    """Return options for barriers over the coordinator instead of the devices.

    A collective on the devices from a thread could interleave with one of the training step.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="jtrain"
    )


def _restore_args(ocp: Any, leaf: Leaf) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _empty(leaf: Leaf) -> Leaf:
    empty = np.zeros(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return empty
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: empty[index])


# One failed write, which is raised, makes hundreds of lines more: for each other write in progress
# asyncio logs that its task or future was never retrieved, Python that a coroutine was never
# awaited, and TensorStore that its event loop is closed.
UNAWAITED = r"coroutine '\w*serialize\w*(\.<locals>\.\w+)?' was never awaited"
"""Pattern of the warnings for coroutines of Orbax that a failed write leaves behind."""
_ORBAX = f"{os.sep}orbax{os.sep}checkpoint{os.sep}"  # part of the path of its files
_STORE = re.compile("[A-Z_]+: Error (opening|reading|writing) ")  # errors of TensorStore


def _hide_failures() -> None:
    """Hide the logged and printed failures of Orbax from now on, and nothing else."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_foreign not in logger.filters:
            logger.addFilter(_is_foreign)
    warnings.filterwarnings("ignore", UNAWAITED, RuntimeWarning)  # repeats add nothing
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


@contextlib.contextmanager
def _hide_task_errors() -> Iterator[None]:
    """Hide all messages of asyncio and Python about the tasks that a failed read leaves behind."""
    loop, hook = logging.getLogger("asyncio"), sys.unraisablehook
    disabled = loop.disabled
    loop.disabled, sys.unraisablehook = True, lambda _: None
    try:
        yield
    finally:
        loop.disabled, sys.unraisablehook = disabled, hook


class _UnraisableHook:
    """Hook for unraisable errors that drops those of Orbax and TensorStore after a write."""

    def __init__(self, previous: Callable[[Any], object]):
        self._previous = previous

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (_is_of_orbax(error) or (closed and unraisable.object is None)):
            self._previous(unraisable)


def _is_foreign(record: logging.LogRecord) -> bool:
    """Return whether neither a log record nor its error comes from Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    return not (_is_of_orbax(error) or _ORBAX in record.pathname or _is_task_of_orbax(record))


def _is_task_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether asyncio logs a task of Orbax, recognized by its file."""
    with contextlib.suppress(TypeError, ValueError):  # wrong arguments, which logging reports
        return record.name == "asyncio" and _ORBAX in record.getMessage()
    return False


def _is_of_orbax(error: BaseException | None) -> bool:
    """Return whether an error went through Orbax, or TensorStore made it outside Python."""
    if error is None:
        return False
    if error.__traceback__ is None:
        return _STORE.match(str(error)) is not None
    trace = error.__traceback__  # a `traceback.extract_tb` reads files, which an exit may be past
    while trace is not None and _ORBAX not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace is not None
