"""Checkpoint layout: names in a directory of checkpoints, atomic commits and deletions.

```
checkpoints/
  300/          complete: `state/` has the arrays, `about.json` their record, `seal.json` the
                sizes and digests of all files
  400.saving/   being written, or left by a killed save
  300.replaced/ the older 300, while a newer one replaces it
  200.deleting/ being deleted, or left by a killed or refused deletion
  100.damaged/  set aside because its seal is broken; never deleted automatically
  100.foreign/  set aside because another run sealed it; never deleted automatically
  .writer       the process that writes here (lock.py)
```
A checkpoint appears by one rename, after everything in it was written, sealed and flushed, and
disappears by one rename before anything in it is deleted. A process that dies at any moment leaves
valid checkpoints and leftovers, never half a checkpoint under the name of a step. A listed
checkpoint has a seal and all files of the seal, of their sizes; a restore first reads every byte.
"""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import seal
from jtrain.checkpoint.directory_entries import DAMAGED, is_step, list_entries
from jtrain.checkpoint.ownership import RunIdentity, check_record
from jtrain.errors import CheckpointError, DamagedError, UserError
from jtrain.io.disk_errors import disk_advice, patiently
from jtrain.io.log import LOG
from jtrain.io.regular_files import FACTS, LinkError, check_no_link, read_json

STATE, ABOUT = "state", "about.json"
_RECORD = ("step", "leaves", "fingerprints", "best", "about")
_SAVING, _REPLACED, _DELETING = ".saving", ".replaced", ".deleting"
# Threads of a failed save still create and remove files while they are deleted.
_MEANWHILE, _TRIES = {errno.ENOENT, errno.ENOTEMPTY}, 10


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, so that a power cut takes none of them.

    Raises:
        OSError: of the file system.
    """
    if not directory.is_dir():
        if directory.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), f"{directory}")
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        seal.sync(directory.parent)


def list_steps(directory: Path, owner: RunIdentity | None = None) -> list[int]:
    """Return the steps of the complete checkpoints (of a run, if one is given), ascending.

    Names and sizes are compared; file contents are not read.
    """
    found = list_named_steps(directory)
    return [step for step in found if not find_faults(directory, step, full=False, owner=owner)]


def list_named_steps(directory: Path) -> list[int]:
    """Return the steps whose checkpoints have a name here, ascending: valid, damaged or emptied."""
    return sorted(int(name) for name in list_entries(directory) if is_step(name))


@patiently
def find_faults(
    directory: Path,
    step: int,
    *,
    full: bool,
    owner: RunIdentity | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[str]:
    """Return how a checkpoint differs from its sealed state; nothing if it is valid.

    Args:
        full: read every byte; otherwise compare only names and sizes.
        owner: the run that the checkpoint must belong to; None for any.
        share: as `seal_faults` takes it.

    Raises:
        UnreachableError: if the system does not let it be read, which is not damage.
    """
    path = directory / str(step)
    try:
        check_no_link(path)
        if not os.listdir(path):
            return ["is empty: all its files are missing"]
        return seal.seal_faults(path, step, full=full, owner=owner, share=share)
    except LinkError as error:
        return [error.strerror or ""]
    except NotADirectoryError:
        return ["is not a folder"]
    except FACTS as error:  # deleted since the listing
        missing = isinstance(error, FileNotFoundError)
        return ["is missing" if missing else f"cannot be read ({error.strerror})"]


def is_foreign(directory: Path, step: int, owner: RunIdentity | None) -> bool:
    """Return whether a checkpoint was sealed by another run than `owner`."""
    run = owner and seal.sealed_run(directory / str(step))
    return owner is not None and run is not None and not owner.owns(run, step)


def set_aside(directory: Path, step: int, ending: str = DAMAGED) -> Path:
    """Rename a checkpoint so that it is never listed or resumed from, and return its new path.

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
            f"checkpoint {step} cannot be resumed from, and cannot be renamed to {path} "
            f"({error.strerror}). Move it by hand, and run again: mv "
            f"{directory / str(step)} {path}"
        ) from None
    return path


def list_leftovers(directory: Path) -> list[Path]:
    """Return what killed saves and deletions left behind."""
    endings = {_SAVING, _REPLACED, _DELETING}
    paths = (directory / name for name in list_entries(directory))
    return sorted(path for path in paths if path.suffix in endings and path.stem.isdigit())


def restore_replaced(directory: Path) -> None:
    """Restore the name of a checkpoint that was being replaced when the process died."""
    for path in list_leftovers(directory):
        original = directory / path.stem
        is_replaced = path.suffix == _REPLACED and path.is_dir() and not path.is_symlink()
        if is_replaced and not original.exists():
            path.rename(original)


_STAYED: set[Path] = set()  # entries that could not be removed, each of which is logged once


def clear_leftovers(directory: Path) -> None:
    """Remove what killed saves and deletions left, except a checkpoint that is restored."""
    restore_replaced(directory)
    for path in list_leftovers(directory):
        try_remove(path)


def clear_deleted(directory: Path) -> None:
    """Remove what deletions left, as far as possible; what a save left may be in use."""
    for path in list_leftovers(directory):
        if path.suffix != _SAVING:
            try_remove(path)


def try_remove(path: Path) -> None:
    """Remove a folder with its contents, a file or a link, if it exists; log a failure once."""
    try:
        remove(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        where = Path(error.filename or path)
        words = disk_advice(error, where.parent).words
        if path not in _STAYED:
            _STAYED.add(path)
            LOG.warning(f"{path} cannot be removed ({error.strerror}: {where}). {words}.")


def saving_path(directory: Path, step: int) -> Path:
    """Return where a checkpoint is written before it is committed."""
    return directory / f"{step}{_SAVING}"


def create_saving_path(directory: Path, step: int) -> Path:
    """Recreate the empty saving path of a step."""
    path = saving_path(directory, step)
    try_remove(path)
    path.mkdir()  # no parents: a missing parent was moved by somebody
    return path


def commit(written: Path, record: Mapping[str, Any], run: str = "") -> None:
    """Seal what was written in the saving path and make it the checkpoint of its step.

    An older checkpoint of the step is replaced.

    Args:
        written: the path that `begin` returned.
        record: the content of about.json.
        run: the id of the run that saves it; empty for none.
    """
    content = {"format": seal.FORMAT, **record}
    (written / ABOUT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    seal.seal(written, int(written.stem), run)
    path = written.with_suffix("")
    replaced = path.with_suffix(_REPLACED)
    if path.exists():
        try_remove(replaced)
        path.rename(replaced)
    written.rename(path)
    seal.sync(written.parent)
    try_remove(replaced)


def check_json(about: Mapping[str, Any]) -> None:
    """Raise CheckpointError if what is recorded with a checkpoint is not JSON."""
    try:
        json.dumps(dict(about))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the `about` of a checkpoint is stored as JSON, and this is not JSON: {error}. "
            f"Use text, numbers, lists and dicts; float(x) converts an array to a number."
        ) from None


def delete_checkpoint(directory: Path, step: int) -> None:
    """Delete a checkpoint: first its name, then its files.

    Raises:
        CheckpointError: if the system refuses it.
    """
    path = directory / f"{step}{_DELETING}"
    try_remove(path)
    try:
        (directory / str(step)).rename(path)
        seal.sync(directory)  # else a power cut could undo the rename and keep the deletions
        remove(path)
    except OSError as error:
        left = f"; the rest of it is in {path}" if os.path.lexists(path) else ""
        where = error.filename or path
        raise CheckpointError(
            f"checkpoint {step} in {directory} cannot be deleted "
            f"({error.strerror}: {where}){left}. {disk_advice(error, Path(where).parent).words}."
        ) from None


def remove(path: Path) -> None:
    """Delete a folder with its contents, or a file.

    Raises:
        OSError: of the file system.
    """
    if not path.is_dir() or path.is_symlink():
        return path.unlink()
    for _ in range(_TRIES):
        try:
            return shutil.rmtree(path)
        except OSError as error:
            if error.errno not in _MEANWHILE or not path.exists():
                raise
    shutil.rmtree(path)


@patiently
def read_record(directory: Path, step: int) -> dict[str, Any]:
    """Return what was recorded with a checkpoint.

    Raises:
        CheckpointError: if it does not exist; a DamagedError if it differs from what was written.
        UnreachableError: if the system does not let it be read.
    """
    path = directory / str(step)
    if step not in list_named_steps(directory):
        raise _missing(directory, step)
    try:
        check_no_link(path)
        if wrong := seal.file_fault(path, step, ABOUT):
            raise damaged_error(directory, step, wrong)
        found = read_json(path / ABOUT, inside=directory)
        check_record(found)
    except LinkError as error:
        raise damaged_error(directory, step, f"{error.filename} {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, *FACTS) as error:
        what = f"{ABOUT}: is not as written ({error})"
        raise damaged_error(directory, step, what) from None
    return {key: found[key] for key in _RECORD}


def check_valid(directory: Path, step: int, owner: RunIdentity | None = None) -> None:
    """Raise unless a checkpoint exists (of a run, if one is given) and every byte is valid.

    Raises:
        CheckpointError: if it does not exist; a DamagedError if a file differs from the seal.
    """
    if step not in list_named_steps(directory):
        raise _missing(directory, step)
    if found := find_faults(directory, step, full=True, owner=owner):
        raise damaged_error(directory, step, summarize(found), owner)


def summarize(found: Sequence[str]) -> str:
    """Return the first of some faults, and the number of others."""
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def damaged_error(
    directory: Path, step: int, what: str, owner: RunIdentity | None = None
) -> DamagedError:
    """Return the error for a damaged checkpoint, with the valid ones."""
    others = [other for other in list_steps(directory, owner) if other != step]
    advice = "It is the only one: restart the run from its beginning."
    if others:
        advice = (
            f"There are others ({_join(others)}): jtrain run resumes from the newest valid one, "
            f"and jtrain eval takes --step {others[-1]}."
        )
    return DamagedError(f"checkpoint {step} is damaged: {what}. {advice}")


def unwritable_error(directory: Path, error: OSError) -> CheckpointError:
    """Return the error for a directory where no checkpoint can be written."""
    return CheckpointError(
        f"checkpoints go to {directory}, which cannot be written ({error.strerror}). "
        f"{disk_advice(error, directory).words}."
    )


def _missing(directory: Path, step: int) -> CheckpointError:
    return CheckpointError(
        f"there is no checkpoint of step {step} in {directory}: {_describe(directory)}"
    )


def _describe(directory: Path) -> str:
    complete, incomplete = list_steps(directory), list_leftovers(directory)
    if complete:
        return f"there are {_join(complete)}. Name one of these, or the newest ({complete[-1]})."
    if incomplete:
        return (
            f"there is only {', '.join(path.name for path in incomplete)}, which is not complete. "
            f"Restart the run from its beginning, or name another directory."
        )
    status = "is empty" if directory.is_dir() else "does not exist"
    return f"the directory {status}. Train first, or name the directory of another run."


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
