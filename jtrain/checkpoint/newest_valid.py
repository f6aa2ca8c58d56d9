"""Resume point: the newest checkpoint whose every byte is as sealed."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

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

    Newer damaged checkpoints are set aside, and all that belong to another run than `owner`. Each
    process reads its share of the bytes; the first one lists and renames, and has the lines.

    `list_steps` returns the named steps, among them the one of its argument, of the directory that
    the process has locked, and raises UnreachableError while that one is away.

    Raises:
        DamagedError: in all processes, if the newest is damaged and `fall_back` is false, or one
            cannot be renamed.
        UnreachableError: in all processes, if the system does not let one be read; none is renamed.
    """
    notices: list[str] = []
    left: list[int] = []  # in the first process: steps that may be valid, ascending

    def begin() -> int | None:
        for step in list_steps():
            foreign = fall_back and layout.is_foreign(directory, step, owner)
            left.extend([] if foreign else [step])
            notices.extend([_set_foreign_aside(directory, step, owner)] if foreign else [])
        return max(left, default=None)

    def look_again(step: int) -> int:
        list_steps([step])
        return step

    def give_up(step: int, faults: Sequence[str]) -> int | None:
        list_steps([step])
        if not fall_back:
            raise damaged_error(directory, step, layout.summarize(faults))
        path = layout.set_aside(directory, step)
        notices.append(
            f"checkpoint {step} is damaged and was set aside as {path}: {layout.summarize(faults)}"
        )
        left.remove(step)
        return max(left, default=None)

    step = _from_first(begin)
    while step is not None:
        faults = shared_faults(directory, step, owner)
        if faults:  # a second look: while a share is away, its files are missing
            _from_first(functools.partial(look_again, step))
            faults = shared_faults(directory, step, owner)
        if not faults:
            break
        step = _from_first(functools.partial(give_up, step, faults))
    return step, notices


def shared_faults(directory: Path, step: int, owner: RunIdentity | None) -> list[str]:
    """Return how a checkpoint differs from its seal; all processes call this, and share the bytes.

    Raises:
        UnreachableError: in all processes, if the system does not let one of them read.
    """
    share = jax.process_index(), jax.process_count()
    mine: dict[str, Any] = {"faults": [], "unreachable": ""}
    try:
        mine["faults"] = layout.find_faults(directory, step, full=True, owner=owner, share=share)
    except UnreachableError as error:
        mine["unreachable"] = str(error)
    found = multihost.all_gather(mine)
    for each in found:
        if each["unreachable"]:
            raise UnreachableError(each["unreachable"])
    return list(dict.fromkeys(fault for each in found for fault in each["faults"]))


def _from_first(make: Callable[[], int | None]) -> int | None:
    """Return the step that the first process makes; what it raises is raised in all of them."""

    def attempt() -> dict[str, Any]:
        try:
            return {"step": make()}
        except (DamagedError, UnreachableError) as error:
            return {"error": str(error), "unreachable": isinstance(error, UnreachableError)}

    found = multihost.broadcast_from_first(attempt)
    if error := found.get("error"):
        raise UnreachableError(error) if found["unreachable"] else DamagedError(error)
    return found["step"]


def _set_foreign_aside(directory: Path, step: int, owner: RunIdentity | None) -> str:
    """Set the checkpoint of another run aside; return a line about it."""
    faults = layout.find_faults(directory, step, full=False, owner=owner)
    path = layout.set_aside(directory, step, directory_entries.FOREIGN)
    return f"checkpoint {step} was set aside as {path}: {layout.summarize(faults)}"


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
