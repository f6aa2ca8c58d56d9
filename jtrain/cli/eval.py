"""`jtrain eval RUN`: the exact metrics of a checkpoint over each complete evaluation set."""

import json
from collections.abc import Sequence

from jtrain.cli.arguments import Arguments
from jtrain.cli.find_run import (
    find_config,
    is_first_process,
    parse_step,
    print_error,
    redirect_output,
)
from jtrain.config.resolve import resolve


def main(argv: Sequence[str]) -> int:
    """Print the metrics; return the exit code."""
    args = _arguments().parse(argv)
    path = find_config(args.run, "eval")
    resolved = resolve(path, args.settings)

    from jtrain.train.restore_run import evaluate_run

    step = parse_step(args.step, "eval")
    with redirect_output():
        step, numbers = evaluate_run(resolved.config, path.parent, step, print_error)
    if not is_first_process():
        return 0
    if args.json:
        found = {"run": str(args.run), "step": step, **numbers}
        print(json.dumps(found, default=lambda array: array.tolist()))
        return 0
    for name, found in numbers.items():
        scalars = {name: x for name, x in found.items() if isinstance(x, int | float)}  # no arrays
        text = "  ".join(f"{name} {value:.6g}" for name, value in scalars.items())
        suffix = f" on {name}" if len(numbers) > 1 else ""
        print(f"{args.run} at step {step}{suffix}:  {text}")
    return 0


def _arguments() -> Arguments:
    parser = Arguments(
        "eval",
        "Evaluate a checkpoint of a run on every row of each evaluation set, on any number of\n"
        "devices.",
        "runs/shakespeare",
        "shakespeare --step best --json",
        "shakespeare parallel.kind=fsdp parallel.devices=4 evaluate.batch=128",
    )
    parser.add_argument("run", metavar="RUN", help="a directory with a run, or its name in runs/")
    words = "values to change, of parallel and evaluate only"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    parser.add_argument("--step", default="newest", help="newest (default), best or a number")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
