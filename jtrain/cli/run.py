"""`jtrain run CONFIG`: train, or go on where it was stopped."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.config.resolve import resolve

CODES = {"done": 0, "failed": 70, "stopped": 75}


def main(argv: Sequence[str]) -> int:
    """Trains; gives the exit code: 0 done, 70 a fault, 75 stopped: run it again to go on."""
    typed = _arguments().parse(argv)
    resolved = resolve(Path(typed.config), typed.settings)
    for note in resolved.notes:
        print(note, file=sys.stderr)

    from jtrain.cli.ending import ending
    from jtrain.run import run

    outcome = run(resolved.config, source=resolved.path)
    print(ending(outcome, resolved.path, shlex.join(["jtrain", "run", *argv])))
    return CODES[outcome.status]


def _arguments() -> Arguments:
    parser = Arguments(
        "run",
        "Trains what a config says, in runs/NAME. The same command goes on with a run that was\n"
        "stopped or killed, bit for bit; on a finished one it says so.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml steps=400 name=try optimizer.lr=1e-3",
        "configs/shakespeare.yaml parallel.kind=fsdp parallel.devices=4",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    words = "values to change, such as optimizer.lr=1e-3"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    return parser
