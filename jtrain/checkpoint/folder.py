"""The directory of checkpoints: what its names mean, and how one comes and goes whole.

```
checkpoints/
  300/          complete: `state/` has the arrays, `about.json` what is said of them
  400.saving/   being written, or left by a save that was killed
  300.replaced/ the older 300, while a newer one takes its place
  200.deleting/ being deleted, or left by a deletion that was killed
```
A checkpoint appears by one rename, after everything in it was written and flushed, and goes by one
rename before anything in it is deleted. So a process that dies anywhere leaves whole checkpoints
and leftovers, never half of one under the name of a whole.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.errors import CheckpointError

STATE, ABOUT = "state", "about.json"
_LOCK = ".__lock"  # TensorStore takes its locks away a moment after it has reported the end
_SAVING, _REPLACED, _DELETING = ".saving", ".replaced", ".deleting"


def steps(directory: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending."""
    if not directory.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if path.name.isascii() and path.name.isdigit() and (path / ABOUT).is_file()
    )


def leftovers(directory: Path) -> list[Path]:
    """What killed saves and deletions left behind."""
    if not directory.is_dir():
        return []
    endings = {_SAVING, _REPLACED, _DELETING}
    return sorted(p for p in directory.iterdir() if p.suffix in endings and p.stem.isdigit())


def clear_leftovers(directory: Path) -> None:
    """Removes them; a checkpoint that was being replaced when the process died is put back."""
    for path in leftovers(directory):
        place = directory / path.stem
        if path.suffix == _REPLACED and not place.exists():
            path.rename(place)
        else:
            shutil.rmtree(path)


def saving(directory: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return directory / f"{step}{_SAVING}"


def begin(directory: Path, step: int) -> Path:
    """That place, made anew and empty."""
    path = saving(directory, step)
    abandon(path)
    path.mkdir(parents=True)
    return path


def abandon(path: Path) -> None:
    """Removes what was begun, if anything is there."""
    shutil.rmtree(path, ignore_errors=True)


def commit(written: Path, record: Mapping[str, Any]) -> None:
    """Makes what `begin` began the checkpoint of its step, in place of an older one."""
    files = _flush(written)
    about = written / ABOUT
    about.write_text(json.dumps({**record, "files": files}, indent=1) + "\n", encoding="utf-8")
    _sync(about)
    place = written.with_suffix("")
    replaced = place.with_suffix(_REPLACED)
    if place.exists():
        place.rename(replaced)
    written.rename(place)
    _sync(written.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def delete(directory: Path, step: int) -> None:
    """Removes a checkpoint: first its name, then its files."""
    path = directory / f"{step}{_DELETING}"
    shutil.rmtree(path, ignore_errors=True)
    (directory / str(step)).rename(path)
    shutil.rmtree(path)


def record(directory: Path, step: int) -> dict[str, Any]:
    """What was recorded with a checkpoint.

    Raises:
        CheckpointError: if it is not there or cannot be read.
    """
    path = directory / str(step) / ABOUT
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {directory}: {_there(directory)}"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: found[key] for key in ("step", "leaves", "best", "about", "files")}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise damaged(directory, step, f"{path} is not what was written ({error!r})") from None


def check_files(directory: Path, step: int, files: Mapping[str, int]) -> None:
    """Makes sure that every file of a checkpoint is there with the size that was written, in bytes.

    Raises:
        CheckpointError: naming the first that is not.
    """
    for name, size in files.items():
        path = directory / str(step) / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long, and was {size}"
            raise damaged(directory, step, f"{path} is {state}")


def damaged(directory: Path, step: int, what: str) -> CheckpointError:
    """The error that says what is wrong with a checkpoint, and which others there are."""
    others = [other for other in steps(directory) if other != step]
    advice = "It is the only one: start the run again from its beginning."
    if others:
        advice = f"To go on from another ({_listed(others)}): rm -r {directory / str(step)}."
    return CheckpointError(f"checkpoint {step} is damaged: {what}. {advice}")


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


def _flush(directory: Path) -> dict[str, int]:
    """Forces all files to the disk; the size of each in bytes, by its path in the directory."""
    sizes = {}
    for path in sorted(directory.rglob("*")):
        if path.name.endswith(_LOCK):
            continue
        _sync(path)
        if path.is_file():
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
