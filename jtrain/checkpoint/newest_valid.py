"""Resume point: the newest checkpoint whose every byte is as sealed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.checkpoint import directory_entries, layout
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.distributed import multihost
from jtrain.errors import DamagedError, DeviceError, UnreachableError

ListSteps: TypeAlias = Callable[..., list[int]]


def newest_valid(
    directory: Path,
    list_steps: ListSteps,
    *,
    fall_back: bool = True,
    owner: RunIdentity | None = None,
) -> tuple[int | None, list[str]]:
    """Return the newest valid step, and a line for each checkpoint that was set aside.

    Newer damaged checkpoints are set aside, and all that belong to another run than `owner`. The
    first process reads and renames; the others receive the step, and no lines.

    `list_steps` returns the named steps, among them the one of its argument, of the directory that
    the process has locked, and raises UnreachableError while that one is away.

    Raises:
        DamagedError: in all processes, if the newest is damaged and `fall_back` is false, or one
            cannot be renamed.
        UnreachableError: in all processes, if the system does not let one be read; none is renamed.
    """
    notices: list[str] = []

    def search() -> dict[str, Any]:
        try:
            return _search(directory, list_steps, fall_back, owner, notices)
        except (DamagedError, UnreachableError) as error:
            return {"error": str(error), "unreachable": isinstance(error, UnreachableError)}

    found = multihost.broadcast_from_first(search)
    if error := found.get("error"):
        raise UnreachableError(error) if found["unreachable"] else DamagedError(error)
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


def _search(
    directory: Path,
    list_steps: ListSteps,
    fall_back: bool,
    owner: RunIdentity | None,
    notices: list[str],
) -> dict[str, Any]:
    steps = list_steps()
    foreign = [s for s in reversed(steps) if fall_back and layout.is_foreign(directory, s, owner)]
    for step in foreign:
        faults = layout.find_faults(directory, step, full=False, owner=owner)
        path = layout.set_aside(directory, step, directory_entries.FOREIGN)
        notices.append(f"checkpoint {step} was set aside as {path}: {layout.summarize(faults)}")
    for step in sorted({*steps} - {*foreign}, reverse=True):
        faults = layout.find_faults(directory, step, full=True, owner=owner)
        # A second look: while a share is away, its files are missing.
        if faults and list_steps([step]):
            faults = layout.find_faults(directory, step, full=True, owner=owner)
        if not faults:
            notices += _describe_strays(directory, step)
            return {"step": step}
        list_steps([step])
        if not fall_back:
            return {"step": step, "damaged": layout.summarize(faults)}
        path = layout.set_aside(directory, step)
        notices.append(
            f"checkpoint {step} is damaged and was set aside as {path}: {layout.summarize(faults)}"
        )
    notices += _describe_strays(directory, -1)
    return {"step": None}


def _describe_strays(directory: Path, newest: int) -> list[str]:
    """Return a line for each checkpoint after `newest` under a name that is no step."""
    return [
        f"checkpoint {step} is in {directory} under the name {name}, which is no step: the run "
        f"does not resume from it. To resume from it, stop this run, and: mv {directory / name} "
        f"{directory / str(step)}"
        for name, step in directory_entries.list_strays(directory)
        if step > newest
    ]
