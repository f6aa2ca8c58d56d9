"""Arrays to a directory and back: the only file that knows Orbax.

Of Orbax's two interfaces this is the older one, `AsyncCheckpointer` over `PyTreeCheckpointHandler`:
the newer is still `experimental`, and its functions were renamed in 0.12.0. Its step manager is
left out: keeping, finding and committing are ours (folder.py), since the manager lists steps whose
background write failed, deletes old steps in place, and reports a failure one save late.

Compression is off: random normal float32 shrinks by 8 % and takes 1.5 to 2 times as long (200 MB).
"""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint.orbax_logging import quiet, silence
from jtrain.core.types import Leaf

MEET = 12 * 3600 * 1000  # milliseconds: meanwhile the first reads and seals every byte


class UnreadableError(Exception):
    """What is wrong with stored arrays, in a line."""


def load() -> None:
    """Imports Orbax, which takes a second; no thread begins by it."""
    import orbax.checkpoint  # noqa: F401


class ArrayWriter:
    """Writes one table of arrays at a time. Every process makes one and calls the same methods."""

    def __init__(self):
        import orbax.checkpoint as ocp

        silence()
        processes = _processes(ocp)
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=processes
        )
        self._args = ocp.args.PyTreeSave
        self._checkpointer = ocp.AsyncCheckpointer(handler, multiprocessing_options=processes)
        self._barrier = ocp.multihost.get_barrier_sync_fn()

    def start(self, directory: Path, arrays: Mapping[str, Leaf]) -> None:
        """Returns when the arrays were copied, and may be donated; the writing goes on."""
        some = {name: array for name, array in arrays.items() if array.size}  # Orbax refuses empty
        self._checkpointer.save(directory, args=self._args(some))

    def finish(self) -> None:
        """Returns when all processes have written their part; raises what went wrong."""
        self._checkpointer.wait_until_finished()

    def meet(self, what: str) -> None:
        """Waits until every process is here; one that dies ends it sooner, by JAX's heartbeat."""
        self._barrier(key=f"jtrain.checkpoint:{what}", timeout_ms=MEET)

    def close(self) -> None:
        """Ends the threads."""
        self._checkpointer.close()


def read(directory: Path, like: Mapping[str, Leaf], *, some: bool = False) -> dict[str, Leaf]:
    """The arrays in a directory, laid out as `like` says; numpy where it says nothing.

    `like` has the names and shapes that were saved: that is not checked here. It has all of them,
    or `some`.

    Raises:
        UnreadableError: if a file is missing or broken, or an array is not there.
    """
    import orbax.checkpoint as ocp

    full = {name: leaf for name, leaf in like.items() if leaf.size}
    processes = _processes(ocp)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    asked = {name: _asked(ocp, leaf) for name, leaf in full.items()}
    args = ocp.args.PyTreeRestore(full, restore_args=asked, partial_restore=some)
    found, problem = {}, ""
    with quiet(), ocp.Checkpointer(handler, multiprocessing_options=processes) as checkpointer:
        try:
            found = checkpointer.restore(directory, args=args)
        except Exception as error:
            problem = short(error)
        if problem:
            gc.collect()  # the tasks that failed complain when they go: let them go here
    if not problem:  # of some, Orbax gives back what was asked for those that are not there
        lost = [name for name in full if not isinstance(found[name], np.ndarray | jax.Array)]
        problem = f"nothing is stored of {', '.join(lost)}" if lost else ""
    if problem:
        raise UnreadableError(problem)
    return {name: found[name] if leaf.size else _empty(leaf) for name, leaf in like.items()}


def short(error: BaseException) -> str:
    """What went wrong, in a line of at most 200 characters: storage errors run to thousands."""
    text = " ".join(
        str(error).split(" [source locations")[0].split(" [tensorstore_spec")[0].split()
    )
    if len(text) > 200:
        text = f"{text[:60]} ... {text[-135:]}"
    return f"{type(error).__name__}: {text}"


def _processes(ocp: Any) -> Any:
    """Options that make processes meet over the coordinator and not over their devices.

    A collective on the devices from a thread could cross one of the training step.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="jtrain"
    )


def _asked(ocp: Any, leaf: Leaf) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _empty(leaf: Leaf) -> Leaf:
    nothing = np.zeros(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return nothing
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: nothing[index])
