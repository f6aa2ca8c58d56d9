"""Where a run goes on: the newest checkpoint of which every byte is what was sealed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import directory_entries, layout
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.distributed import multihost
from jtrain.errors import DamagedError, DeviceError


def newest_valid(
    directory: Path, *, fall_back: bool = True, owner: RunIdentity | None = None
) -> tuple[int | None, list[str]]:
    """That step, and a line for each that was set aside: newer ones that are damaged, and all of
    another run than `owner`.

    The first process reads and renames; the others are told, and have no lines.

    Raises:
        DamagedError: in all of them, if the newest is damaged and `fall_back` is false, or one
            cannot be renamed.
    """
    news: list[str] = []

    def look() -> dict[str, Any]:
        if not fall_back:
            return _newest(directory, owner)
        try:
            return {"step": _search(directory, owner, news)}
        except DamagedError as error:
            return {"refused": str(error)}

    found = multihost.broadcast_from_first(look)
    if words := found.get("refused"):
        raise DamagedError(words)
    if what := found.get("damaged"):
        raise damaged_error(directory, found["step"], what)
    return found["step"], news


def damaged_error(directory: Path, step: int, what: str) -> DamagedError:
    """The error where a damaged one is not to be passed over."""
    return DamagedError(
        f"checkpoint {step} in {directory} is damaged: {what}. checkpoint.on_damage is stop, so "
        f"nothing was renamed. Put it back as it was, or go on from the newest that is whole: the "
        f"same command with checkpoint.on_damage=fall_back"
    )


def replica_error(step: int, found: Sequence[str]) -> DeviceError:
    """The error where some processes have read another leaf than was saved, and others have not.

    Args:
        found: of each process what it has read otherwise.
    """
    odd, what = next((index, what) for index, what in enumerate(found) if what)
    return DeviceError(
        f"checkpoint {step} was read otherwise by process {odd} than by others, which have what "
        f"was saved: {what}. Its memory, its device or its way to the disk is at fault. Run again "
        f"to go on from there, without the host of process {odd} if it is named twice."
    )


def _newest(directory: Path, owner: RunIdentity | None) -> dict[str, Any]:
    step = next(reversed(layout.named_steps(directory)), None)
    found = layout.find_faults(directory, step, full=True, owner=owner) if step is not None else []
    return {"step": step, "damaged": layout.first(found)} if found else {"step": step}


def _search(directory: Path, owner: RunIdentity | None, news: list[str]) -> int | None:
    for step in reversed(layout.named_steps(directory)):
        if layout.is_foreign(directory, step, owner):
            found = layout.find_faults(directory, step, full=False, owner=owner)
            place = layout.set_aside(directory, step, directory_entries.FOREIGN)
            news.append(f"checkpoint {step} was set aside as {place}: {layout.first(found)}")
    for step in reversed(layout.named_steps(directory)):
        found = layout.find_faults(directory, step, full=True, owner=owner)
        if not found:
            news += _lines_of_strays(directory, step)
            return step
        place = layout.set_aside(directory, step)
        news.append(
            f"checkpoint {step} is damaged and was set aside as {place}: {layout.first(found)}"
        )
    news += _lines_of_strays(directory, -1)
    return None


def _lines_of_strays(directory: Path, newest: int) -> list[str]:
    """A line for each checkpoint past `newest` that lies there under a name that is none."""
    return [
        f"checkpoint {step} lies in {directory} as {name}, which is no name of a checkpoint: it is "
        f"not gone on from. To do so, end this run, and: mv {directory / name} "
        f"{directory / str(step)}"
        for name, step in directory_entries.strays(directory)
        if step > newest
    ]
