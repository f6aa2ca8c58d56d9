"""`jtrain report RUN...`: one page about some runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.errors import ConfigError
from jtrain.hooks.rewrite import rewrite
from jtrain.objects import is_address, refuse_address
from jtrain.private import private_files
from jtrain.report.page import facts, page
from jtrain.report.reading import read


def main(argv: Sequence[str]) -> int:
    """Writes the page and says where; gives the exit code."""
    typed = _arguments().parse(argv)
    refuse_address(typed.out, "jtrain report: --out")
    stories = [read(_directory(run)) for run in typed.runs]
    out = Path(typed.out) if typed.out else _place([story.path for story in stories])
    try:
        with private_files():  # as the runs are
            out.parent.mkdir(parents=True, exist_ok=True)
            rewrite(out, page(stories).encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"jtrain report: {out} cannot be written ({error.strerror}); name another file: "
            f"--out report.html"
        ) from None
    for story in stories:
        for line in story.troubles:
            print(f"{story.path}: {line}", file=sys.stderr)
    if typed.json:
        print(json.dumps({"page": str(out), "runs": [facts(story) for story in stories]}))
    else:
        print(f"{out}  {out.stat().st_size:,} bytes; open it in a browser")
    return 0


def _directory(run: str) -> Path:
    """The directory of a run, damaged or not, by its path or its name in runs/."""
    if is_address(run):
        raise ConfigError(
            f"jtrain report: {run} is in an object store, and a run on this disk is needed. Fetch "
            f"it, and name what was fetched: jtrain ckpt fetch {run}"
        )
    for directory in (Path(run), Path("runs") / run):
        if directory.is_dir():
            return directory
    there = sorted(path.name for path in Path("runs").glob("*") if path.is_dir())
    raise ConfigError(
        f"jtrain report: {run} is no directory; in runs/ there is "
        f"{', '.join(there) or 'none: train one by jtrain run CONFIG'}"
    )


def _place(paths: Sequence[Path]) -> Path:
    return paths[0] / "report.html" if len(paths) == 1 else Path("report.html")


def _arguments() -> Arguments:
    parser = Arguments(
        "report",
        "Writes one HTML page about some runs: curves, differences of their values, speed,\n"
        "samples, pictures, environment. It needs no network, opens anywhere, and is written of\n"
        "damaged runs too: what cannot be read is told.",
        "shakespeare                          runs/shakespeare/report.html",
        "try-1 try-2 try-3 --out sweep.html   three runs over one another",
    )
    words = "a directory with a run, or its name in runs/"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=words)
    where = "the page; RUN/report.html of one run, report.html here of several"
    parser.add_argument("--out", metavar="FILE", help=where)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
