"""Copies of a run in an object store: their names, which are whole, and how one comes back.

```
ADDRESS/NAME/
  run.json config.yaml metrics.jsonl ...   the run's own files, as they were at the newest copy
  writer.json                              which process copies here
  checkpoints/300/...                      a checkpoint; its seal.json is the last object written
```
A store has no renaming, so the seal is what makes a copy one: a step without it was not copied to
its end, or is being removed, and nobody reads it. It names every other object, with its size and
digest, so a copy whose seal is there and whose bytes hold is whole.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jtrain.checkpoint import layout, seal
from jtrain.checkpoint.directory_entries import is_step
from jtrain.errors import CheckpointError
from jtrain.io.object_store import ObjectStore

CHECKPOINTS, WRITER = "checkpoints", "writer.json"


def steps(objects: ObjectStore) -> list[int]:
    """Return the steps of the copies that have a seal, ascending; their bytes are not read."""
    return [step for step, sizes in listed(objects).items() if seal.SEAL in sizes]


def listed(objects: ObjectStore) -> dict[int, dict[str, int]]:
    """Return the bytes of each object of each step, ascending, sealed or not."""
    found: dict[int, dict[str, int]] = {}
    for name, size in objects.sizes(CHECKPOINTS).items():
        _, _, rest = name.partition("/")
        step, _, inner = rest.partition("/")
        if is_step(step) and inner:
            found.setdefault(int(step), {})[inner] = size
    return dict(sorted(found.items()))


def fetch(objects: ObjectStore, step: int, directory: Path) -> list[str]:
    """Write a copy into a directory of checkpoints, under its step; return what is wrong with it.

    Every byte is compared with the seal before the step gets its name; where something is wrong,
    nothing stays.
    """
    sizes = listed(objects).get(step, {})
    if seal.SEAL not in sizes:
        return [f"{seal.SEAL}: is missing, so that it was not copied to its end"]
    layout.make_directory(directory)
    place = layout.begin(directory, step)
    try:
        for name in sizes:
            if ".." in name.split("/"):
                return [f"{name}: is no name of a file of a checkpoint"]
            objects.fetch(f"{CHECKPOINTS}/{step}/{name}", place / name)
        if found := seal.faults(place, step, full=True):
            return found
        for path in sorted(place.rglob("*")):
            seal.sync(path)
        place.rename(directory / str(step))
        seal.sync(directory)
        return []
    finally:
        layout.clear(place)


def fetch_files(objects: ObjectStore, path: Path) -> None:
    """Write the run's own files, and its pictures, into its directory."""
    for name in own_files(objects.sizes()):
        objects.fetch(name, path / name)


def own_files(sizes: Mapping[str, int]) -> list[str]:
    """Return the names of those objects that are the run's own files, checkpoints not counted."""
    kept = (name for name in sizes if name != WRITER)
    return [n for n in kept if "/" not in n or (n.startswith("pictures/") and n.count("/") == 1)]


def remove(objects: ObjectStore, step: int, sizes: Mapping[str, int]) -> None:
    """Remove a copy: first its seal, so that what a killed removal leaves is no checkpoint."""
    names = sorted(sizes, key=lambda name: name != seal.SEAL)
    objects.remove(f"{CHECKPOINTS}/{step}/{name}" for name in names)


@contextmanager
def here(objects: ObjectStore, step: int) -> Iterator[tuple[Path, list[str]]]:
    """A directory of checkpoints with one copy in it, and what is wrong with that, for a while."""
    with tempfile.TemporaryDirectory(prefix="jtrain-copy-") as place:
        directory = Path(place) / (objects.address.rpartition("/")[2] or "run") / CHECKPOINTS
        directory.mkdir(parents=True)
        yield directory, fetch(objects, step, directory)


def fetch_newest(
    objects: ObjectStore, path: Path, *, above: int = -1
) -> tuple[int | None, list[str]]:
    """Write the run into `path`: its files, and the newest copy that is whole.

    Args:
        objects: the copies of the run.
        path: the run's directory.
        above: a step that is there; only newer copies are looked at.

    Returns:
        The step, None if there is no newer one; and a line for each copy that is damaged.
    """
    news = []
    directory = path / CHECKPOINTS
    for step in reversed(steps(objects)):
        if step <= above:
            break
        layout.make_directory(directory)
        if (
            directory / str(step)
        ).exists():  # of the disk's copies the damaged are dealt with there
            shutil.move(
                directory / str(step), layout.saving_path(directory, step).with_suffix(".damaged")
            )
        if not (found := fetch(objects, step, directory)):
            fetch_files(objects, path)
            return step, news
        news.append(
            f"the copy of checkpoint {step} in {objects.address} is damaged and was passed over: "
            f"{layout.first(found)}"
        )
    return None, news


def no_copy(objects: ObjectStore) -> CheckpointError:
    """Return the error for an address without a copy of a run."""
    there = ", ".join(sorted({name.partition("/")[0] for name in objects.sizes()})[:8])
    return CheckpointError(
        f"{objects.address} is no copy of a run with a whole checkpoint; there is "
        f"{there or 'nothing'}. Name the run's own address: what checkpoint.store says, and its "
        f"name, s3://bucket/runs/NAME."
    )
