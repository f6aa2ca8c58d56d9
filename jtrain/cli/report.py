"""`jtrain report RUN...`: one page about some runs."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jtrain.checkpoint.retention import BestMetric
from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.config.top import RUNS
from jtrain.errors import ConfigError, UserError
from jtrain.inspect.report.page import render_page, summarize_run
from jtrain.inspect.report.read_run import holds_run, read_run
from jtrain.io.object_store import check_local_path, check_local_run
from jtrain.io.regular_files import atomic_write
from jtrain.sweep.members import read_record
from jtrain.sweep.sweep import format_table, score_member

DEPTH = 2  # runs/ has sweeps, and a sweep has runs


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path; return the exit code."""
    args = _arguments().parse(argv)
    check_local_path(args.out, "jtrain report: --out")
    found = find_runs(args.runs)
    stories = [read_run(run) for run in found.runs]
    alone = found.runs[0] if len(found.runs) == 1 else Path()
    out = Path(args.out) if args.out else (found.folder or alone) / "report.html"
    title = found.folder.resolve().name if found.folder else ""
    best = str(stories[0].config.get("checkpoint.best") or "")
    text = render_page(
        stories, title=title, ranking=ranking(found.folder, best) if found.folder else ()
    )
    _write_page(out, text)
    for line in found.skipped:
        print(line, file=sys.stderr)
    for story in stories:
        for line in story.troubles:
            print(f"{story.path}: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps({"page": str(out), "runs": [summarize_run(story) for story in stories]}))
    else:
        print(f"{out}  {out.stat().st_size:,} bytes; open it in a browser")
    return 0


def _write_page(path: Path, page: str) -> None:
    """Write the page.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, page.encode("utf-8", "replace"))
    except OSError as error:
        folder = "~" if path.absolute().is_relative_to("/tmp") else "/tmp"
        raise ConfigError(
            f"jtrain report: {path} cannot be written ({error.strerror}); name a file elsewhere: "
            f"--out {folder}/report.html"
        ) from None


def ranking(sweep: Path, best: str) -> Sequence[str]:
    """Return the table of a sweep, as `jtrain sweep` prints it; empty where it is none.

    Args:
        best: the runs' `checkpoint.best`, by which they are compared; empty: by the loss.
    """
    members, goal = read_record(sweep), BestMetric.parse(best or "loss")
    try:
        return (
            format_table([score_member(member, goal) for member in members], goal) if goal else ()
        )
    except UserError:  # a member is damaged; the page reports it
        return ()


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
    members = [member.name.rpartition("/")[2] for member in read_record(folder)]
    order = {name: index for index, name in enumerate(members)}
    children = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    for child in sorted(children, key=lambda path: (order.get(path.name, len(order)), path.name)):
        if holds_run(child):
            yield child
        else:
            yield from _inside(child, depth - 1)


def _arguments() -> Arguments:
    parser = Arguments(
        "report",
        "Write one HTML page about some runs: curves, differences of their values, speed,\n"
        "samples, pictures, environment. The page needs no network. Damaged runs are included,\n"
        "with a list of what cannot be read.",
        "shakespeare                          runs/shakespeare/report.html",
        "shakespeare-sweep                    all runs of a sweep, ranked",
        "try-1 try-2 try-3 --out tries.html   three runs over one another",
    )
    words = "a directory with a run, a sweep or a folder of runs, or its name in runs/"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=words)
    where = "the page; default RUN/report.html for one run or sweep, else report.html"
    parser.add_argument("--out", metavar="FILE", help=where)
    parser.add_json()
    return parser
