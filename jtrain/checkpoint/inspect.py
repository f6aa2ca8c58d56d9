"""What the checkpoints in a directory are, without a run: listed, verified, compared, removed."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jtrain.checkpoint import (
    directory_entries,
    fingerprint,
    layout,
    leaf_table,
    record_check,
    retention,
    seal,
    storage,
)
from jtrain.checkpoint.lock import Lock
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.suggestions import did_you_mean
from jtrain.core.types import Leaf
from jtrain.errors import CheckpointError, DamagedError
from jtrain.io.disk_errors import disk_advice

RUNS = Path("runs")


def find_checkpoint(path: str) -> tuple[Path, int | None]:
    """The directory of checkpoints that a path means, and the step if it is one of them.

    Args:
        path: a run, or its name in runs/, a directory of checkpoints, or a checkpoint.

    Raises:
        CheckpointError: if it is none of them.
    """
    for place in (Path(path), RUNS / path):
        if place.name.isdigit() and int(place.name) in layout.named_steps(place.parent):
            return place.parent, int(place.name)
        for directory in (place / "checkpoints", place):
            if directory_entries.leads_outside(directory):
                directory_entries.entries(directory)
            if directory_entries.holds_any(directory):
                return directory, None
    kept = filter(directory_entries.holds_any, RUNS.glob("*/checkpoints"))
    there = sorted(directory.parent.name for directory in kept)
    raise CheckpointError(
        f"{path} is no run with a checkpoint, and no checkpoint. In runs/ there is "
        f"{', '.join(there) or 'none'}{did_you_mean(Path(path).name, there)}; write its name, or "
        f"the path of a checkpoint: runs/NAME/checkpoints/STEP."
    )


def step_of(
    directory: Path, asked: int | Literal["newest", "best"], owner: RunIdentity | None = None
) -> int:
    """The step that is asked for; the newest or best of a run, if one is named.

    Raises:
        CheckpointError: if there is none; a DamagedError if there are only damaged ones.
    """
    there = layout.steps(directory, owner)
    if isinstance(asked, int):
        layout.record(directory, asked)
        return asked
    if not there:
        raise DamagedError(
            f"{directory} has no whole checkpoint; damaged ones are "
            f"{', '.join(map(str, layout.named_steps(directory))) or 'none'}. "
            f"Name one by --step, or see what is wrong: jtrain ckpt verify {directory}"
        )
    step = there[-1] if asked == "newest" else _best(directory, owner)
    if step is None:
        raise CheckpointError(
            f"{directory} has no best checkpoint: none was kept by a metric (checkpoint.best). "
            f"Write --step newest, or one of {', '.join(map(str, there))}."
        )
    return step


def list_checkpoints(directory: Path, owner: RunIdentity | None = None) -> list[dict[str, Any]]:
    """Of each step, ascending, what `jtrain ckpt ls` tells; names and sizes are looked at."""
    whole, best = layout.steps(directory, owner), _best(directory, owner)
    rows = []
    for step in layout.named_steps(directory):
        path = directory / str(step)
        wrong = layout.find_faults(directory, step, full=False, owner=owner)
        said = {} if wrong else layout.record(directory, step)["best"]
        marks = ["newest"] * (step == whole[-1:][0]) if whole else []
        rows.append(
            {
                "step": step,
                "bytes": num_bytes(path),
                "seconds": path.stat().st_mtime,
                "format": seal.FORMAT if os.path.lexists(path / seal.SEAL) else 1,
                "best": {**said} if said.get("name") else {},
                "marks": marks + ["best"] * (step == best),
                "foreign": layout.is_foreign(directory, step, owner),
                "faults": wrong,
            }
        )
    return rows


def verify(directory: Path, step: int, owner: RunIdentity | None = None) -> dict[str, Any]:
    """What is wrong with a step after every byte of it was read, and how long that took."""
    start = time.perf_counter()
    found = layout.find_faults(directory, step, full=True, owner=owner)
    size = num_bytes(directory / str(step))
    return {
        "step": step,
        "bytes": size,
        "seconds": time.perf_counter() - start,
        "sealed": os.path.lexists(directory / str(step) / seal.SEAL),
        "foreign": layout.is_foreign(directory, step, owner),
        "faults": found,
    }


def describe_checkpoint(directory: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself: each leaf, and what was said about it."""
    record = layout.record(directory, step)
    prints = record["fingerprints"]
    return {
        "step": step,
        "path": str(directory / str(step)),
        "leaves": {
            name: {"is": said, "bytes": _bytes(said), "fingerprint": prints.get(name, "")}
            for name, said in record["leaves"].items()
        },
        "best": record["best"],
        "about": record["about"],
    }


def diff_checkpoints(one: tuple[Path, int], other: tuple[Path, int]) -> list[dict[str, Any]]:
    """The leaves that two checkpoints do not have in common, by structure or by value.

    Values are told apart by their fingerprints; only leaves that differ are read.
    """
    layout.check(*one)
    layout.check(*other)
    first, second = (layout.record(*place)["leaves"] for place in (one, other))
    same = sorted(name for name in first.keys() & second.keys() if first[name] == second[name])
    prints = [_prints(place, same) for place in (one, other)]
    apart = [name for name in same if prints[0][name] != prints[1][name]]
    values = [read_arrays(*place, apart) for place in (one, other)]
    rows = []
    for name in sorted(first.keys() | second.keys()):
        said = [leaf.get(name, "-") for leaf in (first, second)]
        if name in apart:
            rows.append({"leaf": name, "is": said, "apart": _apart(*(v[name] for v in values))})
        elif name not in same:
            rows.append({"leaf": name, "is": said, "apart": None})
    return rows


def remove_checkpoints(
    directory: Path, step: int, *, force: bool = False, owner: RunIdentity | None = None
) -> int:
    """Bytes that are free after a checkpoint was removed.

    Raises:
        CheckpointError: if it is the last whole one of its run and not `force`, a run writes there,
            or the system refuses it.
    """
    if step not in layout.named_steps(directory):
        layout.record(directory, step)
    lock = Lock(directory)
    try:
        whole = lambda step: not layout.find_faults(directory, step, full=True, owner=owner)
        others = (n for n in reversed(layout.steps(directory, owner)) if n != step)
        if not force and not any(map(whole, others)) and whole(step):
            raise CheckpointError(
                f"checkpoint {step} in {directory} is the last one that is whole: without it the "
                f"run begins again. To remove it all the same: jtrain ckpt rm "
                f"{directory / str(step)} --force"
            )
        size = num_bytes(directory / str(step))
        layout.delete(directory, step)
        return size
    finally:
        lock.release()


def remove_damaged(directory: Path) -> tuple[list[str], int]:
    """The names of the damaged ones that are gone now, and the bytes that are free.

    Those are what was set aside because it was damaged, and each that is not whole when every byte
    of it is read. Checkpoints of another run stay: they may be all that there is of it.

    Raises:
        CheckpointError: if a run writes there, or the system refuses it.
    """
    lock = Lock(directory)
    try:
        wrong = [
            n for n in layout.named_steps(directory) if layout.find_faults(directory, n, full=True)
        ]
        aside = [
            path
            for path in directory_entries.asides(directory)
            if directory_entries.DAMAGED in path.name
        ]
        paths = [*(directory / str(step) for step in wrong), *aside]
        size = sum(map(num_bytes, paths))
        for step in wrong:
            layout.delete(directory, step)
        for path in aside:
            _remove(path)
        return [path.name for path in paths], size
    finally:
        lock.release()


def read_arrays(directory: Path, step: int, names: list[str]) -> dict[str, np.ndarray]:
    """These leaves of a checkpoint, keys as the integers they are made of.

    Raises:
        CheckpointError: if they cannot be read.
    """
    said = layout.record(directory, step)["leaves"]
    like: dict[str, Leaf] = {name: leaf_table.stored(said[name]) for name in names}
    if not like:
        return {}
    try:
        found = storage.read((directory / str(step) / layout.STATE).absolute(), like, some=True)
    except storage.UnreadableError as error:
        raise layout.damaged_error(directory, step, str(error)) from None
    return {name: np.asarray(found[name]) for name in names}


def num_bytes(path: Path) -> int:
    """Of all files of a directory; nothing of what a link leads to."""
    if path.is_symlink():
        return 0
    return sum(file.stat().st_size for file in path.rglob("*") if _is_own_file(file))


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _remove(path: Path) -> None:
    try:
        layout.remove(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} was to be deleted, and the system refuses it ({error.strerror}: "
            f"{error.filename}). {disk_advice(error, path).words}."
        ) from None


def _best(directory: Path, owner: RunIdentity | None) -> int | None:
    """The best by the metric that the newest was saved under."""
    there = layout.steps(directory, owner)
    said = {step: layout.record(directory, step)["best"] for step in there}
    name = said[there[-1]].get("name") if there else ""
    if not name:
        return None
    asked = record_check.asked_best(layout.record(directory, there[-1])["about"])
    goal = retention.BestMetric.parse(asked or name)
    values = {
        step: best["value"]
        for step, best in said.items()
        if best.get("name") == name and best.get("value") is not None
    }
    return retention.best_of(values, goal) if goal else None


def _prints(place: tuple[Path, int], names: list[str]) -> Mapping[str, str]:
    kept = layout.record(*place)["fingerprints"]
    unknown = [name for name in names if name not in kept]  # of format 1
    return {**kept, **fingerprint.read(fingerprint.begin(read_arrays(*place, unknown)))}


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two elements; NaN where one is NaN and the other is not."""
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    first, second = one.astype(wide), other.astype(wide)
    equal = (first == second) | (np.isnan(first) & np.isnan(second))
    gaps = np.abs(first[~equal] - second[~equal])
    return float(gaps.max()) if gaps.size else 0.0


def _bytes(said: str) -> int:
    leaf: jax.ShapeDtypeStruct = leaf_table.stored(said)
    return math.prod(leaf.shape) * leaf.dtype.itemsize
