"""The runs that a report is asked for: by directory, by name, or all of a sweep."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from jtrain.errors import ConfigError
from jtrain.inspect.report.read_run import EXPECTED
from jtrain.io.object_store import check_on_disk

RUNS = Path("runs")
DEEP = 2  # runs/ has sweeps, and a sweep has runs


@dataclasses.dataclass(frozen=True)
class RunQuery:
    """What some words of a command line stand for."""

    runs: Sequence[Path]
    """The directories of the runs, each once."""
    whole: Path | None
    """The sweep or the folder that all of them lie in, where it was the only word."""
    left_out: Sequence[str]
    """A line for each word that is there and no run."""


def find_runs(words: Sequence[str]) -> RunQuery:
    """Find runs by their directories or names in runs/.

    Of a sweep, or of another folder of runs, all that it has are found. Files and directories that
    hold no run are left out, as `runs/sweep/*` names some.

    Raises:
        ConfigError: if a word names nothing, or none names a run.
    """
    runs: dict[Path, Path] = {}
    left_out, whole = [], None
    for word in words:
        place = _place(word)
        inside = [place] if holds_run(place) else list(_inside(place, DEEP))
        if not inside:
            kind = "a directory that holds no run" if place.is_dir() else "a file"
            left_out.append(f"{word} is {kind}, and is left out")
        elif inside != [place] and len(words) == 1:
            whole = place
        runs |= {run.resolve(): run for run in inside}
    if not runs:
        told = "; ".join(line.removesuffix(", and is left out") for line in left_out)
        raise ConfigError(
            f"jtrain report: {told}. Name a run, a sweep, or a folder of runs; in runs/ there is "
            f"{_listed()}"
        )
    return RunQuery(list(runs.values()), whole, left_out)


def holds_run(directory: Path) -> bool:
    """Return whether any file of a run lies in a directory."""
    return any((directory / name).is_file() for name in EXPECTED)


def _place(word: str) -> Path:
    check_on_disk(word, "jtrain report")
    for place in (Path(word), RUNS / word):
        if place.exists():
            return place
    raise ConfigError(f"jtrain report: {word} is no directory; in runs/ there is {_listed()}")


def _listed() -> str:
    there = sorted(path.name for path in RUNS.glob("*") if path.is_dir())
    return ", ".join(there) or "none: train one by jtrain run CONFIG"


def _inside(folder: Path, deep: int) -> Iterator[Path]:
    """The runs in a folder, those of a sweep in its order."""
    if not folder.is_dir() or not deep:
        return
    order = {name: place for place, name in enumerate(_members(folder))}
    children = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    for child in sorted(children, key=lambda path: (order.get(path.name, len(order)), path.name)):
        if holds_run(child):
            yield child
        else:
            yield from _inside(child, deep - 1)


def _members(folder: Path) -> list[str]:
    """The directories of a sweep's runs, in its order; none where it is none."""
    try:
        said = json.loads((folder / "sweep.json").read_text("utf-8", "replace"))
        return [member["name"].rpartition("/")[2] for member in said["members"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
