"""Reads what a run left behind, as far as it can be read, and tells what cannot."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.config.dump import flatten
from jtrain.config.node import plain
from jtrain.config.read import read as read_config
from jtrain.errors import UserError
from jtrain.io.regular_files import (
    LinkError,
    TooLargeError,
    check_no_link,
    parse_json,
    read_bytes,
)

Row: TypeAlias = Mapping[str, Any]
TOLD, PICTURES, PICTURE_BYTES = 5, 24, 4_000_000  # troubles a file, newest pictures, bytes of each
TEXT_BYTES = 1 << 30  # of a file of rows or words
OF_STEPS = ("loss", "grad_norm")  # of steps.jsonl
EXPECTED = ("config.yaml", "run.json", "metrics.jsonl", "speed.jsonl")


@dataclasses.dataclass(frozen=True)
class RunPicture:
    """A picture that the run made."""

    name: str
    step: int
    png: bytes


@dataclasses.dataclass(frozen=True)
class RunStory:
    """A run as its directory tells it."""

    path: Path
    name: str
    status: str
    """A word of run.json's, or unknown."""
    facts: Row
    """What run.json says."""
    config: Mapping[str, Any]
    """Of each dotted key the value."""
    metrics: tuple[Row, ...]
    steps: tuple[Row, ...]
    """Loss and gradient norm of each step, where they were recorded."""
    speed: tuple[Row, ...]
    leaves: tuple[Row, ...]
    """Statistics of single leaves, where the run wrote them."""
    samples: str
    log: str
    pictures: tuple[RunPicture, ...]
    written: float | None
    """When a file of it was written last, seconds since 1970."""
    troubles: tuple[str, ...]
    """What is damaged or missing, a line each."""

    @property
    def step(self) -> int:
        """The last step that is known of."""
        said = self.facts.get("step")
        said = [said] if isinstance(said, int) else []
        return max([*said, *(row["step"] for row in self.metrics[-1:])], default=0)


def read(path: Path) -> RunStory:
    """What lies in a run's directory; what cannot be read is left out and told in `troubles`."""
    troubles: list[str] = []
    there = [name for name in EXPECTED if (path / name).is_file()]
    if not there:
        troubles.append(f"{path} holds no run: none of {', '.join(EXPECTED)} is there")
    else:
        troubles += [f"{name} is missing" for name in EXPECTED if name not in there]
    facts, config = _facts(path / "run.json", troubles), _config(path / "config.yaml", troubles)
    files = [path / name for name in (*there, "log.txt") if (path / name).is_file()]
    return RunStory(
        path=path,
        name=str(config.get("name") or path.resolve().name),
        status=str(facts.get("status", "unknown")),
        facts=facts,
        config=config,
        metrics=_rows(path / "metrics.jsonl", troubles),
        steps=_steps(_rows(path / "steps.jsonl", troubles), troubles),
        speed=_rows(path / "speed.jsonl", troubles),
        leaves=_rows(path / "leaves.jsonl", troubles),
        samples=_text(path / "samples.txt", troubles),
        log=_text(path / "log.txt", troubles),
        pictures=_pictures(path / "pictures", troubles),
        written=max((file.stat().st_mtime for file in files), default=None),
        troubles=tuple(troubles),
    )


def age(seconds: float | None) -> str:
    """How long ago a time was: `3 min ago`."""
    if seconds is None:
        return ""
    ago = max(0.0, time.time() - seconds)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if ago >= 2 * size:
            return f"{ago / size:.0f} {unit} ago"
    return f"{ago:.0f} s ago"


def number(value: Any) -> float | None:
    """A number of a row, NaN and infinity too; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _rows(path: Path, troubles: list[str]) -> tuple[Row, ...]:
    """The rows that can be read; of two of the same step and names the last counts."""
    found: dict[tuple[int, frozenset[str]], Row] = {}
    wrong: list[str] = []
    for place, line in enumerate(_text(path, troubles).splitlines(), 1):
        row = _row(line)
        if row is None:
            wrong.append(
                f"row {place} of {path.name} cannot be read and is left out: {line[:40]!r}"
            )
            continue
        key = row["step"], frozenset(row)
        if key in found:
            wrong.append(f"row {place} of {path.name} is step {row['step']} again; the last counts")
        found[key] = row
    troubles += wrong[:TOLD]
    if len(wrong) > TOLD:
        troubles.append(f"and {len(wrong) - TOLD} more rows of {path.name}")
    return tuple(sorted(found.values(), key=lambda row: row["step"]))


def _steps(rows: Iterable[Row], troubles: list[str]) -> tuple[Row, ...]:
    """The rows of steps.jsonl, each of which has lists for several steps, as a row a step."""
    found, wrong = [], 0
    for row in rows:
        found_in = {name: row.get(name) for name in OF_STEPS}
        lists = {name: each for name, each in found_in.items() if isinstance(each, list)}
        lengths = {len(each) for each in lists.values()}
        if len(lists) < len(OF_STEPS) or len(lengths) > 1 or 0 in lengths:
            wrong += 1
            continue
        (length,) = lengths
        first = row["step"] - length + 1
        found += [
            {"step": first + i, **{name: each[i] for name, each in lists.items()}}
            for i in range(length)
        ]
    if wrong:
        troubles.append(f"{wrong} rows of steps.jsonl have no lists of {', '.join(OF_STEPS)}")
    return tuple(found)


def _row(line: str) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole and not isinstance(row["step"], bool) else None


def _facts(path: Path, troubles: list[str]) -> Row:
    text = _text(path, troubles)
    try:
        facts = parse_json(text) if text else {}
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        troubles.append(f"{path.name} is no JSON object: {text[:40]!r}")
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
    return flatten(plain(node))


def _text(path: Path, troubles: list[str]) -> str:
    try:
        return read_bytes(path, most=TEXT_BYTES, inside=path.parent).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except LinkError as error:
        troubles.append(f"{path.name} {error.strerror}: it is left out")
    except OSError as error:
        troubles.append(f"{path.name} cannot be read: {error.strerror}")
    except TooLargeError as error:
        troubles.append(f"{path.name} {error} and is left out")
    return ""


def _pictures(folder: Path, troubles: list[str]) -> tuple[RunPicture, ...]:
    """The newest pictures, `NAME-STEP.png`, by name and step."""
    found = []
    try:
        check_no_link(folder)
    except LinkError as error:
        troubles.append(f"{folder.name} {error.strerror}: they are left out")
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
            troubles.append(f"pictures/{file.name} {error.strerror}: it is left out")
            continue
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            pictures.append(RunPicture(name, step, data))
        else:
            troubles.append(f"pictures/{file.name} is no PNG of at most {PICTURE_BYTES:,} bytes")
    return tuple(sorted(pictures, key=lambda picture: (picture.name, picture.step)))


def _picture(file: Path) -> bytes:
    """The bytes of a picture; none if it is no file, or too large.

    Raises:
        LinkError: if it is a link, or its folder is.
    """
    try:
        return read_bytes(file, most=PICTURE_BYTES, inside=file.parent.parent)
    except LinkError:
        raise
    except (OSError, TooLargeError):
        return b""


def finite(value: Any) -> bool:
    """Whether a value of a row is a finite number."""
    found = number(value)
    return found is not None and math.isfinite(found)
