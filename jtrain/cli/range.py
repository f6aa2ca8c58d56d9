"""`jtrain range CONFIG`: a learning-rate range test."""

import json
import shutil
from collections.abc import Sequence

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import is_first_process, resolve_config
from jtrain.cli.output import print_text as print


def main(argv: Sequence[str]) -> int:
    """Train with a growing rate and print the suggestion; return the exit code."""
    parser = _arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words)
    from jtrain.inspect.range_test import STEPS, format_result, parse_rates, run_range_test

    rates = parse_rates(args.rates)
    resolved = resolve_config(path, words)
    steps = STEPS if args.steps is None else args.steps
    found = run_range_test(resolved.config, rates, steps)
    if not is_first_process():
        return 0
    width = min(100, shutil.get_terminal_size().columns)
    facts = {"config": path, **found.plain()}
    print(json.dumps(facts) if args.json else format_result(found, path, width=width))
    return 0


def _arguments() -> Arguments:
    parser = Arguments(
        "range",
        "Train a config for some steps with a learning rate that grows by a constant factor,\n"
        "until the loss diverges, and suggest a rate: the one at which the loss falls fastest.\n"
        "Works under every layout; writes nothing.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml --rates 1e-5:1 --steps 200",
    )
    parser.add_config()
    words = "the lowest and the highest rate (1e-6:1)"
    parser.add_argument("--rates", metavar="LOW:HIGH", default="1e-6:1", help=words)
    parser.add_argument("--steps", metavar="N", type=int, help="steps of the test (100)")
    parser.add_json()
    return parser
