"""`jtrain eval RUN`: the exact metrics of a checkpoint over each whole evaluation set."""

import json
from collections.abc import Sequence

from jtrain.cli.arguments import Arguments
from jtrain.cli.find_run import asked_step, complain, config_of, said_apart, speaks
from jtrain.config.resolve import resolve


def main(argv: Sequence[str]) -> int:
    """Prints the metrics; gives the exit code."""
    typed = _arguments().parse(argv)
    path = config_of(typed.run, "eval")
    resolved = resolve(path, typed.settings)

    from jtrain.train.restore_run import measure

    asked = asked_step(typed.step, "eval")
    with said_apart():
        step, numbers = measure(resolved.config, path.parent, asked, complain)
    if not speaks():
        return 0
    if typed.json:
        found = {"run": str(typed.run), "step": step, **numbers}
        print(json.dumps(found, default=lambda array: array.tolist()))
        return 0
    for name, found in numbers.items():
        plain = {name: x for name, x in found.items() if isinstance(x, int | float)}  # no arrays
        told = "  ".join(f"{name} {value:.6g}" for name, value in plain.items())
        of = f" on {name}" if len(numbers) > 1 else ""
        print(f"{typed.run} at step {step}{of}:  {told}")
    return 0


def _arguments() -> Arguments:
    parser = Arguments(
        "eval",
        "Measures a checkpoint of a run: every row of each evaluation set once, on any number of\n"
        "devices.",
        "runs/shakespeare",
        "shakespeare --step best --json",
        "shakespeare parallel.kind=fsdp parallel.devices=4 evaluate.batch=128",
    )
    parser.add_argument("run", metavar="RUN", help="a directory with a run, or its name in runs/")
    words = "values to change: of parallel and evaluate"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    parser.add_argument("--step", default="newest", help="newest (default), best or a number")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
