"""The readable contents of a run's directory, which may be damaged."""

import dataclasses
import sys
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
from jtrain.train.watch_run import NAME as EVALUATIONS

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
        samples=_text(path / "samples.txt", troubles),
        log=_text(path / "log.txt", troubles),
        pictures=_pictures(path / "pictures", troubles),
        written=max((file.stat().st_mtime for file in files), default=None),
        troubles=tuple(troubles),
    )


def holds_run(directory: Path) -> bool:
    """Return whether a directory has any file of a run."""
    return any((directory / name).is_file() for name in EXPECTED)


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
