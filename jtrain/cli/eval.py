"""`jtrain eval RUN`: the exact metrics of a checkpoint over each complete evaluation set."""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain.cli.arguments import Arguments, find_config, parse_step
from jtrain.cli.output import is_first_process, print_error, redirect_output
from jtrain.cli.output import print_text as print
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError, UserError
from jtrain.io.jsonl import to_json

if TYPE_CHECKING:
    from jtrain.distributed.shutdown import NotedSignals
    from jtrain.train.experiment import RunConfig

_WATCH = {"policy": "every", "timeout": 600.0}  # defaults of the options of --watch


def main(argv: Sequence[str]) -> int:
    """Print the metrics; return the exit code."""
    args = _arguments().parse(argv)
    if args.watch:
        return _watch(args)
    for option, default in _WATCH.items():
        if getattr(args, option) != default:
            raise UserError(f"jtrain eval: --{option} is for --watch. Add --watch, or leave it out")
    path = find_config(args.run, "eval")
    resolved = resolve(path, args.settings)
    if args.tasks:
        return _tasks(args, resolved.config, path.parent)

    from jtrain.distributed.heartbeat import HEARTBEAT
    from jtrain.distributed.watchdog import StartupProgress
    from jtrain.train.restore import evaluate_run

    step = parse_step(args.step, "eval")
    with redirect_output(), StartupProgress(print_error), HEARTBEAT.during("eval"):
        step, numbers = evaluate_run(resolved.config, path.parent, step, print_error)
    if not is_first_process():
        return 0
    _print(args, step, numbers)
    return 0


def _tasks(args: argparse.Namespace, config: "RunConfig", directory: Path) -> int:
    """Print the metrics of the tasks in a file; return the exit code."""
    from jtrain.train.loaded_run import load_run
    from jtrain.train.tasks import evaluate_tasks, read_tasks

    tasks = read_tasks(Path(args.tasks))
    with redirect_output():
        run = load_run(config, directory, parse_step(args.step, "eval"), print_error)
        numbers = evaluate_tasks(run, tasks, batch=config.evaluate.batch)
    if is_first_process():
        _print(args, run.step, {Path(args.tasks).stem: numbers})
    return 0


def _watch(args: argparse.Namespace) -> int:
    """Evaluate the checkpoints of a run as they appear."""
    if args.tasks:
        raise UserError("jtrain eval: --watch follows the sets of a run. Leave out --tasks")
    if args.step != "newest":
        raise UserError(
            f"jtrain eval: --watch evaluates the checkpoints as they appear, and --step "
            f"{args.step} names one. Leave one of the two out"
        )
    if not 0 <= args.timeout < math.inf:
        raise UserError(
            f"jtrain eval: --timeout {args.timeout:g} is not a number of seconds from 0 on"
        )

    from jtrain.distributed.shutdown import NotedSignals
    from jtrain.train.watch_run import WatchEnd, watch_run

    with NotedSignals() as asked:
        _wait_for_run(args.run, args.timeout, asked)
        path = find_config(args.run, "eval")
        config = resolve(path, args.settings).config
        options = {"policy": args.policy, "timeout": args.timeout, "log": print_error}
        with contextlib.closing(watch_run(config, path.parent, asked=asked, **options)) as found:
            while True:
                with redirect_output():
                    each = next(found)
                if isinstance(each, WatchEnd):
                    if is_first_process():
                        print_error(f"{args.run}: {each.why}")
                    return each.code
                if is_first_process():
                    _print(args, each.step, each.results)
                    sys.stdout.flush()


def _wait_for_run(run: str, timeout: float, asked: "NotedSignals") -> None:
    """Wait for a run to begin.

    Args:
        timeout: seconds; 0: without end.

    Raises:
        ConfigError: if there is none in time, with those that exist.
    """
    from jtrain.train.run_dir import find_run

    end, announced = time.monotonic() + (timeout or float("inf")), False
    while True:
        try:
            find_run(run, "jtrain eval")
            return
        except ConfigError as error:
            if time.monotonic() > end or asked.name:
                raise
            if not announced:
                print_error(f"{error}\nwaiting for {run} to begin")
                announced = True
        time.sleep(0.25)


def _print(args: argparse.Namespace, step: int, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    if args.json:
        found = {"run": str(args.run), "step": step, **numbers}
        print(json.dumps(to_json(found), allow_nan=False))
        return
    for name, found in numbers.items():
        scalars = {name: x for name, x in found.items() if isinstance(x, int | float)}  # no arrays
        text = "  ".join(f"{name} {value:.6g}" for name, value in scalars.items())
        suffix = f" on {name}" if len(numbers) > 1 else ""
        print(f"{args.run} at step {step}{suffix}:  {text}")


def _arguments() -> Arguments:
    parser = Arguments(
        "eval",
        "Evaluate a checkpoint of a run on every row of each evaluation set, on any number of\n"
        "devices.",
        "runs/shakespeare",
        "shakespeare --step best --json",
        "shakespeare parallel.kind=fsdp parallel.devices=4 evaluate.batch=128",
        "shakespeare --watch --policy latest       # beside the training, each new checkpoint",
        "chat --tasks questions.jsonl              # choices, or answers that it writes",
    )
    parser.add_run(settings="parallel and evaluate")
    parser.add_step()
    parser.add_argument("--json", action="store_true", help="print one JSON object a step")
    words = "in place of the sets: tasks, a JSON object a line with context, choices and answer"
    parser.add_argument("--tasks", metavar="FILE.jsonl", help=words)
    words = "follow a run: evaluate each new checkpoint until the run has ended, each once"
    parser.add_argument("--watch", action="store_true", help=words)
    words = "with --watch: every checkpoint (default), or only the latest at a time"
    policies, default = ["every", "latest"], _WATCH["policy"]
    parser.add_argument("--policy", choices=policies, default=default, help=words)
    words = "with --watch: seconds for a run to begin or to write again (600); 0: for ever"
    default = _WATCH["timeout"]
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=default, help=words)
    return parser
