"""Resume point: the newest checkpoint whose every byte is as sealed."""

import errno
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.checkpoint import directory_entries, layout
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.distributed import multihost
from jtrain.errors import DamagedError, DeviceError, UnreachableError
from jtrain.io.transient import attempt

Check: TypeAlias = Callable[[], bool]


def newest_valid(
    directory: Path,
    *,
    fall_back: bool = True,
    owner: RunIdentity | None = None,
    known: Collection[int] = (),
    is_in_place: Check = lambda: True,
) -> tuple[int | None, list[str]]:
    """Return the newest valid step, and a line for each checkpoint that was set aside.

    Newer damaged checkpoints are set aside, and all that belong to another run than `owner`. The
    first process reads and renames; the others receive the step, and no lines.

    Args:
        known: steps that had a name when the process locked the directory.
        is_in_place: returns whether the directory is still the folder that it was at the start: a
            share that is away has no checkpoints, or other ones.

    Raises:
        DamagedError: in all processes, if the newest is damaged and `fall_back` is false, or one
            cannot be renamed.
        UnreachableError: in all processes, if the system does not let one be read; none is renamed.
    """
    notices: list[str] = []

    def search() -> dict[str, Any]:
        try:
            if not fall_back:
                return _newest(directory, owner, known, is_in_place)
            return {"step": _search(directory, owner, known, is_in_place, notices)}
        except (DamagedError, UnreachableError) as error:
            return {"error": str(error), "damaged": isinstance(error, DamagedError)}

    found = multihost.broadcast_from_first(search)
    if error := found.get("error"):
        raise DamagedError(error) if found["damaged"] else UnreachableError(error)
    if fault := found.get("damaged"):
        raise damaged_error(directory, found["step"], fault)
    return found["step"], notices


def damaged_error(directory: Path, step: int, fault: str) -> DamagedError:
    """Return the error for a damaged newest checkpoint without fallback."""
    return DamagedError(
        f"checkpoint {step} in {directory} is damaged: {fault}. checkpoint.on_damage is stop, so "
        f"nothing was renamed. Restore its files, or resume from the newest valid checkpoint: the "
        f"same command with checkpoint.on_damage=fall_back"
    )


def replica_error(step: int, found: Sequence[str]) -> DeviceError:
    """Return the error for a leaf that only some processes have read differently from the save.

    Args:
        found: the differing leaves of each process.
    """
    odd, what = next((index, what) for index, what in enumerate(found) if what)
    return DeviceError(
        f"checkpoint {step}: process {odd} read other values than were saved, and the other "
        f"processes did not: {what}. Its memory, its device or its path to the disk is at fault. "
        f"Run again to resume, without the host of process {odd} if it is named twice."
    )


def _newest(
    directory: Path, owner: RunIdentity | None, known: Collection[int], is_in_place: Check
) -> dict[str, Any]:
    step = next(reversed(_list_in_place(directory, known, is_in_place)), None)
    faults = _lasting_faults(directory, step, owner, is_in_place) if step is not None else []
    return {"step": step, "damaged": layout.summarize(faults)} if faults else {"step": step}


def _search(
    directory: Path,
    owner: RunIdentity | None,
    known: Collection[int],
    is_in_place: Check,
    notices: list[str],
) -> int | None:
    steps = _list_in_place(directory, known, is_in_place)
    foreign = [step for step in steps if layout.is_foreign(directory, step, owner)]
    for step in reversed(foreign):
        faults = layout.find_faults(directory, step, full=False, owner=owner)
        path = layout.set_aside(directory, step, directory_entries.FOREIGN)
        notices.append(f"checkpoint {step} was set aside as {path}: {layout.summarize(faults)}")
    for step in sorted({*steps} - {*foreign}, reverse=True):
        faults = _lasting_faults(directory, step, owner, is_in_place)
        if not faults:
            notices += _describe_strays(directory, step)
            return step
        path = layout.set_aside(directory, step)
        notices.append(
            f"checkpoint {step} is damaged and was set aside as {path}: {layout.summarize(faults)}"
        )
    notices += _describe_strays(directory, -1)
    return None


def _list_in_place(directory: Path, known: Collection[int], is_in_place: Check) -> list[int]:
    """Return the named steps; wait while the directory is another one, or has no known step."""

    def look() -> list[int]:
        steps = layout.list_named_steps(directory)
        if not is_in_place() or (known and not {*known} & {*steps}):
            what = "its file system is away, or the folder was moved or emptied"
            raise OSError(errno.ESTALE, what, f"{directory}")
        return steps

    return attempt(directory, look)


def _lasting_faults(
    directory: Path, step: int, owner: RunIdentity | None, is_in_place: Check
) -> list[str]:
    """Return the faults that two looks find: the files of a share that is away are missing."""
    faults: list[str] = []
    for _ in range(2):
        faults = layout.find_faults(directory, step, full=True, owner=owner)
        if not faults:
            break
        _list_in_place(directory, [step], is_in_place)
    return faults


def _describe_strays(directory: Path, newest: int) -> list[str]:
    """Return a line for each checkpoint after `newest` under a name that is no step."""
    return [
        f"checkpoint {step} is in {directory} under the name {name}, which is no step: the run "
        f"does not resume from it. To resume from it, stop this run, and: mv {directory / name} "
        f"{directory / str(step)}"
        for name, step in directory_entries.list_strays(directory)
        if step > newest
    ]
