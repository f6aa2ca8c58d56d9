"""Checkpoint inspection without a run: list, verify, compare and remove checkpoints."""

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jtrain.checkpoint import (
    directory_entries,
    layout,
    leaf_table,
    ownership,
    retention,
    storage,
)
from jtrain.checkpoint.lock import WriteLock
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.top import RUNS
from jtrain.core.types import Leaf
from jtrain.errors import CheckpointError, DamagedError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.disk_errors import disk_advice


def find_checkpoint(path: str) -> tuple[Path, int | None]:
    """Return the directory of checkpoints at a path, and the step if the path is one checkpoint.

    Args:
        path: a run, its name in runs/, a directory of checkpoints, or a checkpoint.

    Raises:
        CheckpointError: if it is none of them.
    """
    for candidate in (Path(path), RUNS / path):
        if candidate.name.isdigit() and int(candidate.name) in layout.list_named_steps(
            candidate.parent
        ):
            return candidate.parent, int(candidate.name)
        for directory in (candidate / "checkpoints", candidate):
            if directory_entries.links_outside(directory):
                directory_entries.list_entries(directory)
            if directory_entries.has_checkpoint(directory):
                return directory, None
    folders = filter(directory_entries.has_checkpoint, RUNS.glob("*/checkpoints"))
    runs = sorted(folder.parent.name for folder in folders)
    raise CheckpointError(
        f"{path} is neither a run with a checkpoint nor a checkpoint. In runs/ there is "
        f"{', '.join(runs) or 'none'}{did_you_mean(Path(path).name, runs)}; write the name of a "
        f"run, or the path of a checkpoint: runs/NAME/checkpoints/STEP."
    )


def resolve_step(
    directory: Path,
    request: int | Literal["newest", "best"],
    owner: RunIdentity | None = None,
    option: str = "--step ",
) -> int:
    """Return the requested step; the newest or best of a run, if one is given.

    Args:
        option: before the step in an error's advice.

    Raises:
        CheckpointError: if there is none; a DamagedError if all are damaged.
    """
    complete = layout.list_steps(directory, owner)
    if isinstance(request, int):
        layout.read_record(directory, request)
        return request
    if not complete:
        raise DamagedError(
            f"{directory} has no valid checkpoint; damaged ones are "
            f"{', '.join(map(str, layout.list_named_steps(directory))) or 'none'}. "
            f"To list the faults: jtrain ckpt verify {directory}"
        )
    step = complete[-1] if request == "newest" else _best(directory, owner)
    if step is None:
        raise CheckpointError(
            f"{directory} has no best checkpoint: none was retained by a metric (checkpoint.best). "
            f"Write {option}newest, or one of {', '.join(map(str, complete))}."
        )
    return step


def list_checkpoints(directory: Path, owner: RunIdentity | None = None) -> list[dict[str, Any]]:
    """Return a row of `jtrain ckpt ls` for each step, ascending; names and sizes are checked."""
    complete, best = layout.list_steps(directory, owner), _best(directory, owner)
    rows = []
    for step in layout.list_named_steps(directory):
        path = directory / str(step)
        faults = layout.find_faults(directory, step, full=False, owner=owner)
        best_value = {} if faults else layout.read_record(directory, step)["best"]
        marks = ["newest"] * (step == complete[-1:][0]) if complete else []
        rows.append(
            {
                "step": step,
                "bytes": num_bytes(path),
                "seconds": path.stat().st_mtime,
                "best": {**best_value} if best_value.get("name") else {},
                "marks": marks + ["best"] * (step == best),
                "foreign": layout.is_foreign(directory, step, owner),
                "faults": faults,
            }
        )
    return rows


def verify(directory: Path, step: int, owner: RunIdentity | None = None) -> dict[str, Any]:
    """Read every byte of a checkpoint, and return its faults and the time."""
    start = time.perf_counter()
    faults = layout.find_faults(directory, step, full=True, owner=owner)
    size = num_bytes(directory / str(step))
    return {
        "step": step,
        "bytes": size,
        "seconds": time.perf_counter() - start,
        "foreign": layout.is_foreign(directory, step, owner),
        "faults": faults,
    }


def describe_checkpoint(directory: Path, step: int) -> dict[str, Any]:
    """Return the record of a checkpoint: its leaves, its best value and its `about`."""
    record = layout.read_record(directory, step)
    prints = record["fingerprints"]
    leaves = {name: leaf_table.parse_leaf(text) for name, text in record["leaves"].items()}
    size = lambda leaf: leaf.size * leaf.dtype.itemsize
    return {
        "step": step,
        "path": str(directory / str(step)),
        "leaves": {
            name: {"is": text, "bytes": size(leaves[name]), "fingerprint": prints.get(name, "")}
            for name, text in record["leaves"].items()
        },
        "best": record["best"],
        "about": record["about"],
    }


def diff_checkpoints(one: tuple[Path, int], other: tuple[Path, int]) -> list[dict[str, Any]]:
    """Return the leaves that differ between two checkpoints, by structure or by value.

    Values are compared by their fingerprints; only leaves that differ are read.
    """
    layout.check_valid(*one)
    layout.check_valid(*other)
    records = [layout.read_record(*place) for place in (one, other)]
    first, second = (record["leaves"] for record in records)
    same = sorted(name for name in first.keys() & second.keys() if first[name] == second[name])
    prints = [record["fingerprints"] for record in records]
    differing = [name for name in same if prints[0].get(name) != prints[1].get(name)]
    values = [read_arrays(*place, differing) for place in (one, other)]
    rows = []
    for name in sorted(first.keys() | second.keys()):
        texts = [leaf.get(name, "-") for leaf in (first, second)]
        if name in differing:
            rows.append(
                {"leaf": name, "is": texts, "distance": _difference(*(v[name] for v in values))}
            )
        elif name not in same:
            rows.append({"leaf": name, "is": texts, "distance": None})
    return rows


def remove_checkpoints(
    directory: Path, step: int, *, force: bool = False, owner: RunIdentity | None = None
) -> int:
    """Delete a checkpoint, and return the freed bytes.

    Raises:
        CheckpointError: if it is the last valid one of its run and not `force`, a run writes to the
            directory, or the system refuses it.
    """
    if step not in layout.list_named_steps(directory):
        layout.read_record(directory, step)
    lock = WriteLock(directory)
    try:

        def is_valid(step: int) -> bool:
            return not layout.find_faults(directory, step, full=True, owner=owner)

        others = (n for n in reversed(layout.list_steps(directory, owner)) if n != step)
        if not force and not any(map(is_valid, others)) and is_valid(step):
            raise CheckpointError(
                f"checkpoint {step} in {directory} is the last valid one: without it the run "
                f"restarts from its beginning. To delete it anyway: jtrain ckpt rm "
                f"{directory / str(step)} --force"
            )
        size = num_bytes(directory / str(step))
        layout.delete_checkpoint(directory, step)
        return size
    finally:
        lock.release()


def remove_damaged(directory: Path) -> tuple[list[str], int]:
    """Delete damaged checkpoints; return their names and the freed bytes.

    Damaged are those that were set aside as damaged, and those with a fault when every byte is
    read. Checkpoints of another run stay: they may be the only ones of that run.

    Raises:
        CheckpointError: if a run writes to the directory, or the system refuses it.
    """
    lock = WriteLock(directory)
    try:
        damaged = [
            n
            for n in layout.list_named_steps(directory)
            if layout.find_faults(directory, n, full=True)
        ]
        set_aside = [
            path
            for path in directory_entries.list_set_aside(directory)
            if directory_entries.DAMAGED in path.name
        ]
        paths = [*(directory / str(step) for step in damaged), *set_aside]
        size = sum(map(num_bytes, paths))
        for step in damaged:
            layout.delete_checkpoint(directory, step)
        for path in set_aside:
            _remove(path)
        return [path.name for path in paths], size
    finally:
        lock.release()


def read_arrays(directory: Path, step: int, names: list[str]) -> dict[str, np.ndarray]:
    """Read some leaves of a checkpoint, keys as their integers.

    Raises:
        CheckpointError: if they cannot be read.
    """
    leaves = layout.read_record(directory, step)["leaves"]
    abstract: dict[str, Leaf] = {name: leaf_table.parse_leaf(leaves[name]) for name in names}
    if not abstract:
        return {}
    try:
        arrays = storage.read(
            (directory / str(step) / layout.STATE).absolute(), abstract, some=True
        )
    except storage.UnreadableError as error:
        raise layout.damaged_error(directory, step, str(error)) from None
    return {name: np.asarray(arrays[name]) for name in names}


def num_bytes(path: Path) -> int:
    """Return the bytes of all files in a directory, without following links."""
    if path.is_symlink():
        return 0
    files = (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    return sum(file.stat().st_size for file in files)


def _remove(path: Path) -> None:
    try:
        layout.remove(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be deleted ({error.strerror}: "
            f"{error.filename}). {disk_advice(error, path).words}."
        ) from None


def _best(directory: Path, owner: RunIdentity | None) -> int | None:
    """Return the best step by the metric of the newest checkpoint."""
    complete = layout.list_steps(directory, owner)
    record = layout.read_record(directory, complete[-1]) if complete else {"best": {}}
    if not (name := record["best"].get("name")):
        return None
    goal = retention.BestMetric.parse(ownership.configured_best(record["about"]) or name)
    return retention.find_best(directory, complete, goal) if goal else None


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference of two elements; NaN if only one is NaN."""
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    first, second = one.astype(wide), other.astype(wide)
    equal = (first == second) | (np.isnan(first) & np.isnan(second))
    gaps = np.abs(first[~equal] - second[~equal])
    return float(gaps.max()) if gaps.size else 0.0
