"""Object store layout: the names of the copies of a run, and how to fetch a valid one.

```
ADDRESS/NAME/
  run.json config.yaml metrics.jsonl ...   the files of the run at the newest copy
  writer.json                              the process that copies
  checkpoints/300/...                      a checkpoint; its seal.json is the last object written
```
A store has no renaming, so the seal completes a copy: a step without a seal is an unfinished copy
or an unfinished removal, and is never read. The seal names every other object, with its size and
digest, so a copy with a seal and matching bytes is valid.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jtrain.checkpoint import layout, seal
from jtrain.checkpoint.directory_entries import is_step
from jtrain.errors import CheckpointError
from jtrain.io.object_store import ObjectStore

CHECKPOINTS, WRITER = "checkpoints", "writer.json"


def list_copies(objects: ObjectStore) -> list[int]:
    """Return the steps of the copies that have a seal, ascending; their bytes are not read."""
    return [step for step, sizes in object_sizes(objects).items() if seal.SEAL in sizes]


def object_sizes(objects: ObjectStore) -> dict[int, dict[str, int]]:
    """Return the bytes of each object of each step, ascending, sealed or not."""
    found: dict[int, dict[str, int]] = {}
    for name, size in objects.sizes(CHECKPOINTS).items():
        _, _, rest = name.partition("/")
        step, _, inner = rest.partition("/")
        if is_step(step) and inner:
            found.setdefault(int(step), {})[inner] = size
    return dict(sorted(found.items()))


def fetch(objects: ObjectStore, step: int, directory: Path) -> list[str]:
    """Download a copy into a directory of checkpoints, under its step; return its faults.

    Every byte is compared with the seal before the step gets its name; a faulty copy leaves
    nothing.
    """
    sizes = object_sizes(objects).get(step, {})
    if seal.SEAL not in sizes:
        return [f"{seal.SEAL}: is missing: the copy was not finished"]
    layout.make_directory(directory)
    path = layout.create_saving_path(directory, step)
    try:
        for name in sizes:
            if {"", ".", ".."} & set(name.split("/")):  # `a//b` is a legal name of an object
                return [f"{name}: is not a file name of a checkpoint"]
            objects.fetch(f"{CHECKPOINTS}/{step}/{name}", path / name)
        if faults := seal.seal_faults(path, step, full=True):
            return faults
        for file in sorted(path.rglob("*")):
            seal.sync(file)
        path.rename(directory / str(step))
        seal.sync(directory)
        return []
    finally:
        layout.try_remove(path)


def fetch_files(objects: ObjectStore, path: Path) -> None:
    """Download the files of the run, and its pictures, into its directory."""
    for name in run_files(objects.sizes()):
        objects.fetch(name, path / name)


def run_files(sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the objects that are files of the run, without checkpoints."""
    names = (name for name in sizes if name != WRITER)
    return [n for n in names if "/" not in n or (n.startswith("pictures/") and n.count("/") == 1)]


def remove(objects: ObjectStore, step: int, sizes: Mapping[str, int]) -> None:
    """Remove a copy: first its seal, so that a killed removal leaves no checkpoint."""
    names = sorted(sizes, key=lambda name: name != seal.SEAL)
    objects.remove(f"{CHECKPOINTS}/{step}/{name}" for name in names)


@contextmanager
def temporary_copy(objects: ObjectStore, step: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield a temporary directory of checkpoints with one copy in it, and its faults."""
    with tempfile.TemporaryDirectory(prefix="jtrain-copy-") as folder:
        directory = Path(folder) / (objects.address.rpartition("/")[2] or "run") / CHECKPOINTS
        directory.mkdir(parents=True)
        yield directory, fetch(objects, step, directory)


def fetch_newest(
    objects: ObjectStore, path: Path, *, above: int = -1
) -> tuple[int | None, list[str]]:
    """Download the files of a run and its newest valid copy into `path`.

    Args:
        above: an existing step; only newer copies are fetched.

    Returns:
        The step, None if there is no newer one; and a line for each damaged copy.
    """
    notices = []
    directory = path / CHECKPOINTS
    for step in reversed(list_copies(objects)):
        if step <= above:
            break
        layout.make_directory(directory)
        if (directory / str(step)).exists():  # a damaged one
            layout.set_aside(directory, step)
        if not (faults := fetch(objects, step, directory)):
            fetch_files(objects, path)
            return step, notices
        notices.append(
            f"the copy of checkpoint {step} in {objects.address} is damaged and was skipped: "
            f"{layout.summarize(faults)}"
        )
    return None, notices


def no_copy_error(objects: ObjectStore) -> CheckpointError:
    """Return the error for an address without a copy of a run."""
    names = ", ".join(sorted({name.partition("/")[0] for name in objects.sizes()})[:8])
    return CheckpointError(
        f"{objects.address} is not a copy of a run with a complete checkpoint; it has "
        f"{names or 'nothing'}. Name the address of the run: checkpoint.store and the name of the "
        f"run, s3://bucket/runs/NAME."
    )
