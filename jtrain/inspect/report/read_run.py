"""The readable contents of a run's directory, with a list of damages."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.config.dump import flatten
from jtrain.config.node import without_origins
from jtrain.config.read import read as read_config
from jtrain.errors import UserError
from jtrain.io.regular_files import (
    LinkError,
    TooLargeError,
    check_no_link,
    parse_json,
    read_bytes,
)
from jtrain.train.evaluation import NAME as EVALUATIONS

Row: TypeAlias = Mapping[str, Any]
# Reported troubles per file; newest pictures; bytes of a picture.
MAX_TROUBLES, PICTURES, PICTURE_BYTES = 5, 24, 4_000_000
TEXT_BYTES = 1 << 30  # limit of a text file
STEP_COLUMNS = ("loss", "grad_norm")  # columns of steps.jsonl
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


def format_age(seconds: float | None) -> str:
    """Format the time since a time stamp: `3 min ago`."""
    if seconds is None:
        return ""
    ago = max(0.0, time.time() - seconds)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if ago >= 2 * size:
            return f"{ago / size:.0f} {unit} ago"
    return f"{ago:.0f} s ago"


def to_number(value: Any) -> float | None:
    """Convert a value of a row to a number, including NaN and infinity; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _rows(path: Path, troubles: list[str]) -> tuple[Row, ...]:
    """Return the readable rows by step; the last of rows with the same step and names counts."""
    found: dict[tuple[int, frozenset[str]], Row] = {}
    errors: list[str] = []
    for line_number, line in enumerate(_text(path, troubles).splitlines(), 1):
        row = _row(line)
        if row is None:
            errors.append(
                f"row {line_number} of {path.name} cannot be read and is skipped: {line[:40]!r}"
            )
            continue
        key = row["step"], frozenset(row)
        if key in found:
            errors.append(
                f"row {line_number} of {path.name} repeats step {row['step']}; the last row counts"
            )
        found[key] = row
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
        columns = {name: row.get(name) for name in STEP_COLUMNS}
        lists = {name: each for name, each in columns.items() if isinstance(each, list)}
        lengths = {len(each) for each in lists.values()}
        if len(lists) < len(STEP_COLUMNS) or len(lengths) > 1 or 0 in lengths:
            errors += 1
            continue
        (length,) = lengths
        first = row["step"] - length + 1
        found += [
            {"step": first + i, **{name: each[i] for name, each in lists.items()}}
            for i in range(length)
        ]
    if errors:
        troubles.append(f"{errors} rows of steps.jsonl have no lists of {', '.join(STEP_COLUMNS)}")
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
    try:
        return read_bytes(path, most=TEXT_BYTES, inside=path.parent).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except LinkError as error:
        troubles.append(f"{path.name} {error.strerror}: it is skipped")
    except OSError as error:
        troubles.append(f"{path.name} cannot be read: {error.strerror}")
    except TooLargeError as error:
        troubles.append(f"{path.name} {error} and is skipped")
    return ""


def _pictures(folder: Path, troubles: list[str]) -> tuple[RunPicture, ...]:
    """Return the newest pictures, `NAME-STEP.png`, by name and step."""
    found = []
    try:
        check_no_link(folder)
    except LinkError as error:
        troubles.append(f"{folder.name} {error.strerror}: its files are skipped")
        return ()
    for file in sorted(folder.glob("*.png")) if folder.is_dir() else []:
        name, _, step = file.stem.rpartition("-")
        if name and step.isdecimal():
            found.append((int(step), name, file))
    newest = sorted(found)[-PICTURES:]
    pictures = []
    for step, name, file in newest:
        try:
            data = _picture(file)
        except LinkError as error:
            troubles.append(f"pictures/{file.name} {error.strerror}: it is skipped")
            continue
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            pictures.append(RunPicture(name, step, data))
        else:
            troubles.append(f"pictures/{file.name} is not a PNG of at most {PICTURE_BYTES:,} bytes")
    return tuple(sorted(pictures, key=lambda picture: (picture.name, picture.step)))


def _picture(file: Path) -> bytes:
    """Return the bytes of a picture; empty if it is not a file, or too large.

    Raises:
        LinkError: if the file or its folder is a link.
    """
    try:
        return read_bytes(file, most=PICTURE_BYTES, inside=file.parent.parent)
    except LinkError:
        raise
    except (OSError, TooLargeError):
        return b""


def is_finite_number(value: Any) -> bool:
    """Return whether a value of a row is a finite number."""
    found = to_number(value)
    return found is not None and math.isfinite(found)
