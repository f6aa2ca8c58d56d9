"""The runs that a command line names, and the readable contents of a run's directory."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.config.dump import flatten
from jtrain.config.node import without_origins
from jtrain.config.read import read as read_config
from jtrain.config.top import RUNS
from jtrain.errors import ConfigError, UserError
from jtrain.io.object_store import check_local_run
from jtrain.io.regular_files import (
    LinkError,
    TooLargeError,
    check_no_link,
    parse_json,
    read_bytes,
    read_json,
)
from jtrain.train.evaluation import NAME as EVALUATIONS

DEPTH = 2  # runs/ has sweeps, and a sweep has runs


@dataclasses.dataclass(frozen=True)
class RunQuery:
    """The runs that the words of a command line name."""

    runs: Sequence[Path]
    """The directories of the runs, each once."""
    folder: Path | None
    """The sweep or folder of all runs, if it was the only word."""
    skipped: Sequence[str]
    """A line for each word that names an existing path without a run."""


def find_runs(words: Sequence[str]) -> RunQuery:
    """Find runs by their directories or names in runs/.

    A sweep, or another folder of runs, gives all its runs. Files and directories without a run are
    skipped, since `runs/sweep/*` includes some.

    Raises:
        ConfigError: if a word names no path, or no word names a run.
    """
    runs: dict[Path, Path] = {}
    skipped, folder = [], None
    for word in words:
        path = _find_path(word)
        inside = [path] if holds_run(path) else list(_inside(path, DEPTH))
        if not inside:
            kind = "a directory without a run" if path.is_dir() else "a file"
            skipped.append(f"{word} is {kind}, and is skipped")
        elif inside != [path] and len(words) == 1:
            folder = path
        runs |= {run.resolve(): run for run in inside}
    if not runs:
        reasons = "; ".join(line.removesuffix(", and is skipped") for line in skipped)
        raise ConfigError(
            f"jtrain report: {reasons}. Name a run, a sweep, or a folder of runs. Available in "
            f"runs/: {_available()}"
        )
    return RunQuery(list(runs.values()), folder, skipped)


def holds_run(directory: Path) -> bool:
    """Return whether a directory has any file of a run."""
    return any((directory / name).is_file() for name in EXPECTED)


def _find_path(word: str) -> Path:
    check_local_run(word, "jtrain report")
    for path in (Path(word), RUNS / word):
        if path.exists():
            return path
    raise ConfigError(
        f"jtrain report: {word} is not a directory. Available in runs/: {_available()}"
    )


def _available() -> str:
    names = sorted(path.name for path in RUNS.glob("*") if path.is_dir())
    return ", ".join(names) or "none: train one by jtrain run CONFIG"


def _inside(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs in a folder; those of a sweep in its order."""
    if not folder.is_dir() or not depth:
        return
    order = {name: index for index, name in enumerate(_members(folder))}
    children = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    for child in sorted(children, key=lambda path: (order.get(path.name, len(order)), path.name)):
        if holds_run(child):
            yield child
        else:
            yield from _inside(child, depth - 1)


def _members(folder: Path) -> list[str]:
    """Return the directory names of a sweep's runs in order; empty if it is no sweep."""
    try:
        sweep = read_json(folder / "sweep.json", most=1 << 26, inside=folder)
        return [member["name"].rpartition("/")[2] for member in sweep["members"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


Row: TypeAlias = Mapping[str, Any]
# Reported troubles per file; newest pictures; bytes of a picture.
MAX_TROUBLES, PICTURES, PICTURE_BYTES = 5, 24, 4_000_000
TEXT_BYTES = 1 << 30  # limit of a text file
EXPECTED = ("config.yaml", "run.json", "metrics.jsonl", "speed.jsonl")


@dataclasses.dataclass(frozen=True)
class RunPicture:
    """A picture in the run's directory."""

    name: str
    step: int
    png: bytes


@dataclasses.dataclass(frozen=True)
class RunStory:
    """The contents of a run's directory."""

    path: Path
    name: str
    status: str
    """Status in run.json, or `unknown`."""
    facts: Row
    """Contents of run.json."""
    config: Mapping[str, Any]
    """Values by dotted key."""
    metrics: tuple[Row, ...]
    steps: tuple[Row, ...]
    """Loss and gradient norm of each recorded step."""
    speed: tuple[Row, ...]
    leaves: tuple[Row, ...]
    """Statistics of single leaves, if the run wrote them."""
    samples: str
    log: str
    pictures: tuple[RunPicture, ...]
    written: float | None
    """Time of the last write to a file of the run, in seconds since 1970."""
    troubles: tuple[str, ...]
    """A line for each damaged or missing file."""

    @property
    def step(self) -> int:
        """Last known step."""
        step = self.facts.get("step")
        steps = [step] if isinstance(step, int) else []
        return max([*steps, *(row["step"] for row in self.metrics[-1:])], default=0)


def read_run(path: Path) -> RunStory:
    """Read a run's directory; unreadable parts are skipped and reported in `troubles`."""
    troubles: list[str] = []
    existing = [name for name in EXPECTED if (path / name).is_file()]
    if not existing:
        troubles.append(f"{path} has no run: none of {', '.join(EXPECTED)} exists")
    else:
        troubles += [f"{name} is missing" for name in EXPECTED if name not in existing]
    facts, config = _facts(path / "run.json", troubles), _config(path / "config.yaml", troubles)
    files = [path / name for name in (*existing, "log.txt") if (path / name).is_file()]
    return RunStory(
        path=path,
        name=str(config.get("name") or path.resolve().name),
        status=str(facts.get("status", "unknown")),
        facts=facts,
        config=config,
        metrics=_with_evaluations(
            _rows(path / "metrics.jsonl", troubles), _rows(path / EVALUATIONS, troubles)
        ),
        steps=_steps(_rows(path / "steps.jsonl", troubles), troubles),
        speed=_rows(path / "speed.jsonl", troubles),
        leaves=_rows(path / "leaves.jsonl", troubles),
        samples=_text(path / "samples.txt", troubles),
        log=_text(path / "log.txt", troubles),
        pictures=_pictures(path / "pictures", troubles),
        written=max((file.stat().st_mtime for file in files), default=None),
        troubles=tuple(troubles),
    )


def finite_number(value: Any) -> float | None:
    """Return a value of a row as a number; None if it is no finite one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def _rows(path: Path, troubles: list[str]) -> tuple[Row, ...]:
    """Return the readable rows by step; the last of rows with the same step and names counts."""
    found: dict[tuple[int, frozenset[str]], Row] = {}
    errors: list[str] = []
    for number, line in enumerate(_text(path, troubles).splitlines(), 1):
        if (row := _row(line)) is not None:
            found[row["step"], frozenset(row)] = row
        else:
            errors.append(
                f"row {number} of {path.name} cannot be read and is skipped: {line[:40]!r}"
            )
    troubles += errors[:MAX_TROUBLES]
    if len(errors) > MAX_TROUBLES:
        troubles.append(f"and {len(errors) - MAX_TROUBLES} more rows of {path.name}")
    return tuple(sorted(found.values(), key=lambda row: row["step"]))


def _with_evaluations(metrics: tuple[Row, ...], others: tuple[Row, ...]) -> tuple[Row, ...]:
    """Add the evaluations of another program, where the run itself has not evaluated the step."""
    known = {(row["step"], name) for row in metrics for name in row}
    added = []
    for row in others:
        step = row["step"]
        new = {name: x for name, x in row.items() if "/" in name and (step, name) not in known}
        added += [{"step": step, **new}] if new else []
    return tuple(sorted([*metrics, *added], key=lambda row: row["step"]))


def _steps(rows: Iterable[Row], troubles: list[str]) -> tuple[Row, ...]:
    """Expand the rows of steps.jsonl, which have lists for several steps, to a row per step."""
    found, errors = [], 0
    for row in rows:
        losses, norms = row.get("loss"), row.get("grad_norm")
        if not (isinstance(losses, list) and isinstance(norms, list) and len(losses) == len(norms)):
            errors += 1
            continue
        first = row["step"] - len(losses) + 1
        pairs = enumerate(zip(losses, norms, strict=True), first)
        found += [{"step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in pairs]
    if errors:
        troubles.append(f"{errors} rows of steps.jsonl have no lists of loss, grad_norm")
    return tuple(found)


def _row(line: str) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    valid = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if valid and not isinstance(row["step"], bool) else None


def _facts(path: Path, troubles: list[str]) -> Row:
    text = _text(path, troubles)
    try:
        facts = parse_json(text) if text else {}
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        troubles.append(f"{path.name} is not a JSON object: {text[:40]!r}")
        return {}
    return facts


def _config(path: Path, troubles: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        node, mistakes = read_config(path, 0, inside=path.parent)
    except UserError as error:
        troubles.append(str(error))
        return {}
    troubles += [str(mistake) for mistake in mistakes]
    return flatten(without_origins(node))


def _text(path: Path, troubles: list[str]) -> str:
    data = _read(path, path.parent, TEXT_BYTES, troubles)
    return data.decode("utf-8", "replace")


def _read(path: Path, folder: Path, most: int, troubles: list[str]) -> bytes:
    """Return the contents of a file of a run; empty, with a trouble, if it cannot be read."""
    name = path.relative_to(folder)
    try:
        return read_bytes(path, most=most, inside=folder)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except LinkError as error:
        troubles.append(f"{name} {error.strerror}: it is skipped")
    except OSError as error:
        troubles.append(f"{name} cannot be read: {error.strerror}")
    except TooLargeError as error:
        troubles.append(f"{name} {error} and is skipped")
    return b""


def _pictures(folder: Path, troubles: list[str]) -> tuple[RunPicture, ...]:
    """Return the newest pictures, `NAME-STEP.png`, by name and step."""
    try:
        check_no_link(folder)
    except LinkError as error:
        troubles.append(f"{folder.name} {error.strerror}: its files are skipped")
        return ()
    found, pictures = [], []
    for file in folder.glob("*.png"):
        name, _, step = file.stem.rpartition("-")
        if name and step.isdecimal():
            found.append((int(step), name, file))
    for step, name, file in sorted(found)[-PICTURES:]:
        if data := _read(file, folder.parent, PICTURE_BYTES, troubles):
            if data.startswith(b"\x89PNG\r\n\x1a\n"):
                pictures.append(RunPicture(name, step, data))
            else:
                troubles.append(f"pictures/{file.name} is not a PNG")
    return tuple(sorted(pictures, key=lambda picture: (picture.name, picture.step)))
