"""`jtrain sweep CONFIG KEY=A,B ...`: several runs of a config, ranked."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.errors import DONE, FAULT, STOPPED, UserError
from jtrain.io.jsonl import to_json


def main(argv: Sequence[str]) -> int:
    """Run the members; return the exit code: 0 all done, 70 some failed, 75 stopped (resumable)."""
    args = _arguments().parse(argv)
    if args.jobs < 1:
        raise UserError(f"jtrain sweep: --jobs {args.jobs} is not a count; write --jobs 2")

    from jtrain.sweep.sweep import as_json, format_table, sweep

    stream = sys.stderr if args.json else sys.stdout
    result = sweep(
        Path(args.file),
        args.settings,
        jobs=args.jobs,
        metric=args.metric,
        tell=lambda line: print(line, file=stream, flush=True),
    )
    if args.json:
        report = as_json(result.name, result.scores, result.goal)
        print(json.dumps(to_json({**report, "stopped": result.stopped}), allow_nan=False))
    else:
        print("\n".join(format_table(result.scores, result.goal)))
        print(f"a page about all of them: jtrain report {result.name}")
    if result.stopped:
        again = shlex.join(["jtrain", "sweep", *argv])
        print(f"stopped: {result.stopped}. To resume: {again}", file=stream)
        return STOPPED
    return FAULT if any(one.status == "failed" for one in result.scores) else DONE


def _arguments() -> Arguments:
    parser = Arguments(
        "sweep",
        "Run a config once for each combination of values, in runs/NAME/..., and rank the runs.\n"
        "The same command resumes a stopped sweep and skips finished runs.\n\n"
        "KEY=A,B,C      these values (commas inside brackets or quotes do not split)\n"
        "KEY=0..2       whole numbers, both ends; 0..50..10 in steps of 10\n"
        "KEY=A          this value for all of them",
        "configs/shakespeare.yaml optimizer.lr=1e-4,3e-4 seed=0..2 steps=200 --jobs 2",
    )
    parser.add_argument("file", metavar="CONFIG", help="a YAML file")
    words = "values to sweep, and values shared by all; name=NAME names the sweep"
    parser.add_argument("settings", metavar="KEY=VALUES", nargs="*", help=words)
    words = "runs at a time, each on cores and GPUs of its own (1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=words)
    words = "the metric to compare: loss, 'highest accuracy', ... (checkpoint.best, or else loss)"
    parser.add_argument("--metric", default="", help=words)
    parser.add_json()
    return parser
