"""`jtrain report RUN...`: one page about some runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.checkpoint.retention import BestMetric
from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.cli.output import write_page
from jtrain.errors import UserError
from jtrain.inspect.report.page import render_page
from jtrain.inspect.report.read_run import RunQuery, find_runs, read_run
from jtrain.inspect.report.series import summarize_run
from jtrain.io.object_store import check_local_path
from jtrain.sweep.members import read_record
from jtrain.sweep.results import format_table, score_member


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path; return the exit code."""
    args = _arguments().parse(argv)
    check_local_path(args.out, "jtrain report: --out")
    found = find_runs(args.runs)
    stories = [read_run(run) for run in found.runs]
    out = Path(args.out) if args.out else _default_path(found)
    title = found.folder.resolve().name if found.folder else ""
    best = str(stories[0].config.get("checkpoint.best") or "")
    text = render_page(
        stories, title=title, ranking=ranking(found.folder, best) if found.folder else ()
    )
    written = write_page("report", "--out", out, text)
    for line in found.skipped:
        print(line, file=sys.stderr)
    for story in stories:
        for line in story.troubles:
            print(f"{story.path}: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps({"page": str(out), "runs": [summarize_run(story) for story in stories]}))
    else:
        print(written)
    return 0


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


def _default_path(found: RunQuery) -> Path:
    if found.folder:
        return found.folder / "report.html"
    return found.runs[0] / "report.html" if len(found.runs) == 1 else Path("report.html")


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
