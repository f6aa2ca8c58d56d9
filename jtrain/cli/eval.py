"""`jtrain eval RUN`: the exact metrics of a checkpoint over the whole validation set."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jtrain.cli.arguments import Arguments
from jtrain.config.resolve import resolve
from jtrain.errors import CheckpointError, ConfigError


def main(argv: Sequence[str]) -> int:
    """Prints the metrics; gives the exit code."""
    typed = _arguments().parse(argv)
    resolved = resolve(_config(typed.run), typed.settings)

    from jtrain.run import measure

    step, numbers = measure(resolved.config, _config(typed.run).parent, _asked(typed.step))
    if typed.json:
        print(json.dumps({"run": str(typed.run), "step": step, "valid": numbers}))
    else:
        told = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
        print(f"{typed.run} at step {step}:  {told}")
    return 0


def _config(run: str) -> Path:
    """The config of a run, by its directory or its name in runs/."""
    for directory in (Path(run), Path("runs") / run):
        if (directory / "config.yaml").is_file():
            return directory / "config.yaml"
    there = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    raise ConfigError(
        f"jtrain eval: {run} is no directory of a run; in runs/ there is "
        f"{', '.join(there) or 'none: train one by jtrain run CONFIG'}"
    )


def _asked(step: str) -> int | Literal["newest", "best"]:
    if step == "newest" or step == "best":
        return step
    if step.isdigit():
        return int(step)
    raise CheckpointError(f"jtrain eval: --step {step} is no step; write newest, best or a number")


def _arguments() -> Arguments:
    parser = Arguments(
        "eval",
        "Measures a checkpoint of a run: every row of the validation set once, on any number of\n"
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
