"""The directory of checkpoints: what its names mean, and how one comes and goes whole.

```
checkpoints/
  300/          complete: `state/` has the arrays, `about.json` what is said of them, `seal.json`
                what each file was when it was whole
  400.saving/   being written, or left by a save that was killed
  300.replaced/ the older 300, while a newer one takes its place
  200.deleting/ being deleted, or left by a deletion that was killed or refused
  100.damaged/  set aside, because its seal did not hold; never deleted by itself
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
from jtrain.errors import CheckpointError, DamagedError

STATE, ABOUT = "state", "about.json"
_RECORD = ("step", "leaves", "best", "about")
_SAVING, _REPLACED, _DELETING, _DAMAGED = ".saving", ".replaced", ".deleting", ".damaged"


def make(directory: Path) -> None:
    """Makes a folder and those above it that are missing, so that a power cut takes none of them.

    Raises:
        OSError: what the disk says.
    """
    if not directory.is_dir():
        if directory.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), f"{directory}")
        make(directory.parent)
        directory.mkdir(exist_ok=True)
        seal.sync(directory.parent)


def steps(directory: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending; their bytes are not read."""
    return [step for step in named(directory) if not faults(directory, step, full=False)]


def named(directory: Path) -> list[int]:
    """The steps whose checkpoints have a name here, ascending, whole or damaged."""
    if not directory.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if path.name.isascii() and path.name.isdigit() and path.name == str(int(path.name))
        if any((path / part).exists() for part in (STATE, ABOUT, seal.SEAL))
    )


def faults(directory: Path, step: int, *, full: bool) -> list[str]:
    """What of a checkpoint is otherwise than when it was sealed; nothing if it is whole.

    Args:
        directory: of the checkpoints.
        step: one of them.
        full: reads every byte; otherwise only names and sizes are compared.
    """
    path = directory / str(step)
    try:
        if _unsealed(path):
            sizes = {name: [size] for name, size in record(directory, step)["files"].items()}
            sizes[ABOUT] = [(path / ABOUT).stat().st_size]  # of which it cannot say its own
            return seal.differences(path, sizes, full=False)
        return seal.faults(path, step, full=full)
    except OSError as error:  # deleted since it was listed, say
        return [f"cannot be read ({error})"]


def set_aside(directory: Path, step: int) -> Path:
    """Where a damaged checkpoint lies from now on: under a name that is never listed."""
    names = (f"{step}{_DAMAGED}{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    path = next(path for name in names if not (path := directory / name).exists())
    (directory / str(step)).rename(path)
    seal.sync(directory)
    return path


def leftovers(directory: Path) -> list[Path]:
    """What killed saves and deletions left behind."""
    if not directory.is_dir():
        return []
    endings = {_SAVING, _REPLACED, _DELETING}
    return sorted(p for p in directory.iterdir() if p.suffix in endings and p.stem.isdigit())


def put_back(directory: Path) -> None:
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
    put_back(directory)
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
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        tell(f"{path} cannot be removed ({error.strerror}). Remove it by hand: rm -r {path}")


def saving(directory: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return directory / f"{step}{_SAVING}"


def begin(directory: Path, step: int) -> Path:
    """That place, made anew and empty."""
    path = saving(directory, step)
    clear(path)
    path.mkdir()  # and no folder above it: if that is gone, somebody moved it
    return path


def commit(written: Path, record: Mapping[str, Any]) -> None:
    """Makes what `begin` began the checkpoint of its step, sealed, in place of an older one."""
    said = {"format": seal.FORMAT, **record}
    (written / ABOUT).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    seal.seal(written, int(written.stem))
    place = written.with_suffix("")
    replaced = place.with_suffix(_REPLACED)
    if place.exists():
        clear(replaced)
        place.rename(replaced)
    written.rename(place)
    seal.sync(written.parent)
    clear(replaced)


def delete(directory: Path, step: int) -> None:
    """Removes a checkpoint: first its name, then its files, as far as they can be.

    Raises:
        OSError: if its name cannot be removed.
    """
    path = directory / f"{step}{_DELETING}"
    clear(path)
    (directory / str(step)).rename(path)
    seal.sync(directory)  # or a power cut could undo the renaming and not the deletions
    clear(path)


def record(directory: Path, step: int) -> dict[str, Any]:
    """What was recorded with a checkpoint.

    Raises:
        CheckpointError: if it is not there; a DamagedError if it is not what was written.
    """
    path = directory / str(step) / ABOUT
    if step not in named(directory):
        raise _missing(directory, step)
    old = _unsealed(path.parent)
    if wrong := "" if old else seal.fault_of(path.parent, ABOUT):
        raise damaged(directory, step, wrong)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sizes = {"files": found["files"]} if old else {}
        prints = {"fingerprints": found.get("fingerprints", {})}
        return {**sizes, **prints, **{key: found[key] for key in _RECORD}}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise damaged(directory, step, f"{path} is not what was written ({error!r})") from None


def check(directory: Path, step: int) -> None:
    """Makes sure that a checkpoint is there, and reads every byte of it.

    Raises:
        CheckpointError: if it is not there; a DamagedError if a file is not what it was when it was
            sealed.
    """
    if step not in named(directory):
        raise _missing(directory, step)
    if found := faults(directory, step, full=True):
        raise damaged(directory, step, first(found))


def first(found: Sequence[str]) -> str:
    """The first of some faults, and how many more there are."""
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def damaged(directory: Path, step: int, what: str) -> DamagedError:
    """The error that says what is wrong with a checkpoint, and which others there are."""
    others = [other for other in steps(directory) if other != step]
    advice = "It is the only one: start the run again from its beginning."
    if others:
        advice = (
            f"There are others ({_listed(others)}): jtrain run goes on from the newest that is "
            f"whole, and jtrain eval takes --step {others[-1]}."
        )
    return DamagedError(f"checkpoint {step} is damaged: {what}. {advice}")


def unwritable(directory: Path, error: OSError) -> CheckpointError:
    """The error that says that no checkpoint can be written there."""
    return CheckpointError(
        f"checkpoints go to {directory}, which cannot be written ({error.strerror}): make it "
        f"writable, make room, or name another directory."
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


def _unsealed(path: Path) -> bool:
    """Whether a checkpoint is of format 1."""
    if (path / seal.SEAL).exists():
        return False
    try:
        found = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        return "format" not in found and {*_RECORD, "files"} <= found.keys()
    except (ValueError, AttributeError, OSError):
        return False
