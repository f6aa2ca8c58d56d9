"""The directory of checkpoints: what its names mean, and how one comes and goes whole.

```
checkpoints/
  300/          complete: `state/` has the arrays, `about.json` what is said of them, `seal.json`
                what each file was when it was whole
  400.saving/   being written, or left by a save that was killed
  300.replaced/ the older 300, while a newer one takes its place
  200.deleting/ being deleted, or left by a deletion that was killed or refused
  100.damaged/  set aside, because its seal did not hold; never deleted by itself
  100.foreign/  set aside, because another run sealed it; likewise
  .writer       who writes here (lock.py)
```
A checkpoint appears by one rename, after everything in it was written, sealed and flushed, and
goes by one rename before anything in it is deleted. So a process that dies anywhere leaves whole
checkpoints and leftovers, never half of one under the name of a whole. What is listed has a seal,
and all files that the seal names, of their sizes; every byte is read before one is restored.

Format 1, before there were seals: `about.json` has the sizes, under `files`, and no `format`.
"""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import seal
from jtrain.checkpoint.directory_entries import DAMAGED, entries, is_step
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.checkpoint.record_check import check_record
from jtrain.errors import CheckpointError, DamagedError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.regular_files import LinkError, check_no_link, read_json

STATE, ABOUT = "state", "about.json"
_RECORD = ("step", "leaves", "best", "about")
_SAVING, _REPLACED, _DELETING = ".saving", ".replaced", ".deleting"


def make_directory(directory: Path) -> None:
    """Makes a folder and those above it that are missing, so that a power cut takes none of them.

    Raises:
        OSError: what the disk says.
    """
    if not directory.is_dir():
        if directory.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), f"{directory}")
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        seal.sync(directory.parent)


def steps(directory: Path, owner: RunIdentity | None = None) -> list[int]:
    """The steps of the complete checkpoints (of a run, if one is named), ascending; their bytes are
    not read."""
    found = named_steps(directory)
    return [step for step in found if not find_faults(directory, step, full=False, owner=owner)]


def named_steps(directory: Path) -> list[int]:
    """The steps whose checkpoints have a name here, ascending, whole, damaged or emptied."""
    return sorted(int(name) for name in entries(directory) if is_step(name))


def find_faults(
    directory: Path, step: int, *, full: bool, owner: RunIdentity | None = None
) -> list[str]:
    """What of a checkpoint is otherwise than when it was sealed; nothing if it is whole.

    Args:
        directory: of the checkpoints.
        step: one of them.
        full: reads every byte; otherwise only names and sizes are compared.
        owner: the run whose checkpoint it has to be; None for any.
    """
    path = directory / str(step)
    try:
        check_no_link(path)
        if not path.is_dir():
            return ["is no folder" if os.path.lexists(path) else "is gone"]
        if not any(path.iterdir()):
            return ["is empty: all its files are gone"]
        if (old := _unsealed(path)) is not None:
            sizes = {name: [size] for name, size in old["files"].items()}
            sizes[ABOUT] = [(path / ABOUT).stat().st_size]  # of which it cannot say its own
            other = [f"{ABOUT}: is of step {old['step']}"] if old["step"] != step else []
            return other + seal.differences(path, sizes, full=False)
        return seal.faults(path, step, full=full, owner=owner)
    except LinkError as error:
        return [error.strerror or ""]
    except OSError as error:  # deleted since it was listed, or not allowed
        return [f"cannot be read ({error.strerror})"]


def is_foreign(directory: Path, step: int, owner: RunIdentity | None) -> bool:
    """Return whether a checkpoint was sealed by another run than `owner`."""
    return owner is not None and not owner.owns(seal.run_of(directory / str(step)), step)


def set_aside(directory: Path, step: int, ending: str = DAMAGED) -> Path:
    """Where a checkpoint lies from now on that is not gone on from: under a name that is never
    listed.

    Raises:
        DamagedError: if the system refuses to rename it.
    """
    names = (f"{step}{ending}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    path = next(path for name in names if not os.path.lexists(path := directory / name))
    try:
        (directory / str(step)).rename(path)
        seal.sync(directory)
    except OSError as error:
        raise DamagedError(
            f"checkpoint {step} is not one to go on from, and was to be set aside as {path}; that "
            f"is refused ({error.strerror}). Move it yourself, and run again: mv "
            f"{directory / str(step)} {path}"
        ) from None
    return path


def leftovers(directory: Path) -> list[Path]:
    """What killed saves and deletions left behind."""
    endings = {_SAVING, _REPLACED, _DELETING}
    paths = (directory / name for name in entries(directory))
    return sorted(path for path in paths if path.suffix in endings and path.stem.isdigit())


def restore_replaced(directory: Path) -> None:
    """Gives a checkpoint its name again that was being replaced when the process died."""
    for path in leftovers(directory):
        place = directory / path.stem
        whole = path.suffix == _REPLACED and path.is_dir() and not path.is_symlink()
        if whole and not place.exists():
            path.rename(place)


def clear_leftovers(directory: Path, tell: Callable[[str], object] = lambda line: None) -> None:
    """Removes them, but for a checkpoint that is put back; what they are does not matter.

    Args:
        tell: takes a line for each that cannot be removed.
    """
    restore_replaced(directory)
    for path in leftovers(directory):
        clear(path, tell)


def clear_deleted(directory: Path, tell: Callable[[str], object]) -> None:
    """Removes what deletions left, as far as it can be; what a save left may be in use yet."""
    for path in leftovers(directory):
        if path.suffix != _SAVING:
            clear(path, tell)


def clear(path: Path, tell: Callable[[str], object] = lambda line: None) -> None:
    """Removes a folder with all that is in it, a file or a link, if one is there."""
    try:
        remove(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        where = Path(error.filename or path)
        words = disk_advice(error, where.parent).words
        tell(f"{path} cannot be removed ({error.strerror}: {where}). {words}.")


def saving_path(directory: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return directory / f"{step}{_SAVING}"


def begin(directory: Path, step: int) -> Path:
    """That place, made anew and empty."""
    path = saving_path(directory, step)
    clear(path)
    path.mkdir()  # and no folder above it: if that is gone, somebody moved it
    return path


def commit(written: Path, record: Mapping[str, Any], run: str = "") -> None:
    """Makes what `begin` began the checkpoint of its step, sealed, in place of an older one.

    Args:
        written: what `begin` gave.
        record: what is kept in about.json.
        run: the id of the run that saves it; empty for none.
    """
    said = {"format": seal.FORMAT, **record}
    (written / ABOUT).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    seal.seal(written, int(written.stem), run)
    place = written.with_suffix("")
    replaced = place.with_suffix(_REPLACED)
    if place.exists():
        clear(replaced)
        place.rename(replaced)
    written.rename(place)
    seal.sync(written.parent)
    clear(replaced)


def delete(directory: Path, step: int) -> None:
    """Removes a checkpoint: first its name, then its files.

    Raises:
        CheckpointError: if the system refuses it.
    """
    path = directory / f"{step}{_DELETING}"
    clear(path)
    try:
        (directory / str(step)).rename(path)
        seal.sync(directory)  # or a power cut could undo the renaming and not the deletions
        remove(path)
    except OSError as error:
        left = f"; what is left of it lies in {path}" if os.path.lexists(path) else ""
        where = error.filename or path
        raise CheckpointError(
            f"checkpoint {step} was to be deleted in {directory}, and the system refuses it "
            f"({error.strerror}: {where}){left}. {disk_advice(error, Path(where).parent).words}."
        ) from None


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, or a file.

    Raises:
        OSError: what the system says.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def record(directory: Path, step: int) -> dict[str, Any]:
    """What was recorded with a checkpoint.

    Raises:
        CheckpointError: if it is not there; a DamagedError if it is not what was written.
    """
    path = directory / str(step)
    if step not in named_steps(directory):
        raise _missing(directory, step)
    try:
        check_no_link(path)
        old = _unsealed(path)
        if wrong := "" if old else seal.fault_of(path, step, ABOUT):
            raise damaged_error(directory, step, wrong)
        found = old or read_json(path / ABOUT, inside=directory)
        check_record(found)
    except LinkError as error:
        raise damaged_error(directory, step, f"{error.filename} {error.strerror}") from None
    except (ValueError, OSError) as error:
        what = f"{ABOUT}: is not what was written ({error})"
        raise damaged_error(directory, step, what) from None
    sizes = {"files": found["files"]} if old else {}
    prints = {"fingerprints": found.get("fingerprints", {})}
    return {**sizes, **prints, **{key: found[key] for key in _RECORD}}


def check(directory: Path, step: int, owner: RunIdentity | None = None) -> None:
    """Makes sure that a checkpoint is there (of a run, if one is named), and reads every byte.

    Raises:
        CheckpointError: if it is not there; a DamagedError if a file is not what it was when it was
            sealed.
    """
    if step not in named_steps(directory):
        raise _missing(directory, step)
    if found := find_faults(directory, step, full=True, owner=owner):
        raise damaged_error(directory, step, first(found), owner)


def first(found: Sequence[str]) -> str:
    """The first of some faults, and how many more there are."""
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def damaged_error(
    directory: Path, step: int, what: str, owner: RunIdentity | None = None
) -> DamagedError:
    """The error that says what is wrong with a checkpoint, and which others there are."""
    others = [other for other in steps(directory, owner) if other != step]
    advice = "It is the only one: start the run again from its beginning."
    if others:
        advice = (
            f"There are others ({_listed(others)}): jtrain run goes on from the newest that is "
            f"whole, and jtrain eval takes --step {others[-1]}."
        )
    return DamagedError(f"checkpoint {step} is damaged: {what}. {advice}")


def unwritable_error(directory: Path, error: OSError) -> CheckpointError:
    """The error that says that no checkpoint can be written there."""
    return CheckpointError(
        f"checkpoints go to {directory}, which cannot be written ({error.strerror}). "
        f"{disk_advice(error, directory).words}."
    )


def _missing(directory: Path, step: int) -> CheckpointError:
    return CheckpointError(
        f"there is no checkpoint of step {step} in {directory}: {_there(directory)}"
    )


def _there(directory: Path) -> str:
    there, left = steps(directory), leftovers(directory)
    if there:
        return f"there are {_listed(there)}. Ask for one of these, or for the newest ({there[-1]})."
    if left:
        return (
            f"there is only {', '.join(path.name for path in left)}, which is not complete. "
            f"Start the run again from its beginning, or name another directory."
        )
    what = "is empty" if directory.is_dir() else "does not exist"
    return f"the directory {what}. Train first, or name the directory of another run."


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _unsealed(path: Path) -> dict[str, Any] | None:
    """The record of a checkpoint of format 1; None for another."""
    if os.path.lexists(path / seal.SEAL):
        return None
    try:
        found = read_json(path / ABOUT, inside=path.parent)
        check_record(found)
    except (ValueError, OSError):
        return None
    return found if "format" not in found and isinstance(found.get("files"), dict) else None
