"""Runs for a report: by directory, by name, or all of a sweep."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from jtrain.config.top import RUNS
from jtrain.errors import ConfigError
from jtrain.inspect.report.read_run import EXPECTED
from jtrain.io.object_store import check_local_run
from jtrain.io.regular_files import read_json

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
