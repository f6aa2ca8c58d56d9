"""`jtrain check CONFIG`: check that the split of a batch does not change what a config trains."""

import json
import os
import time
from collections.abc import Callable, Sequence

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error, resolve_config
from jtrain.cli.output import print_text as print
from jtrain.errors import FAULT, UserError
from jtrain.inspect.plan.topology import prepare_environment

PROGRESS_SECONDS = 5.0  # between lines about the progress


def main(argv: Sequence[str]) -> int:
    """Compare and print; return the exit code: 0 if equal, 70 if the split changes the result."""
    parser = _arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words)
    for name, least in {"devices": 1, "rows": 2}.items():
        if getattr(args, name) < least:
            raise UserError(
                f"jtrain check: --{name} {getattr(args, name)} is too few to split; write "
                f"--{name} 8, or at least {least}."
            )
    prepare_cpu(args.devices)

    from jtrain.testing import check
    from jtrain.testing.case import build_loss_case

    resolved = resolve_config(path, words)
    case = build_loss_case(resolved.config, args.rows, draws=not args.without_draws)
    report = check(case, most=args.devices, log=make_progress())
    print(json.dumps({"config": path, **report.plain()}) if args.json else report.describe())
    return 0 if report.ok else FAULT


def prepare_cpu(devices: int) -> None:
    """Make JAX compute on so many virtual CPU devices, unless the environment says otherwise.

    Call it before importing JAX.
    """
    prepare_environment(f"cpu:{devices}")
    # With LLVM at -O0 a check takes 0.73 of the time; XLA's own passes (fusion too) still run.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def make_progress() -> Callable[[str], None]:
    """Return a function that prints the name of a comparison, at most one each few seconds."""
    start = printed = time.monotonic()

    def begin(name: str) -> None:
        nonlocal printed
        now = time.monotonic()
        if now >= printed + PROGRESS_SECONDS or printed == start:
            printed = now
            print_error(f"comparing: {name} ({now - start:.0f} s)")

    return begin


def _arguments() -> Arguments:
    parser = Arguments(
        "check",
        "Compare the loss, the gradient and the next state of a config under every split of a\n"
        "batch (rows, microbatches, padding, masks, strategies) with one device, in float32, and\n"
        "in float64 where float32 is inconclusive. Name the error in the loss. Trains nothing.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml model.layers=2 --devices 8",
        "configs/vae.yaml --rows 16 --json",
    )
    parser.add_config()
    words = "virtual CPU devices (4)"
    parser.add_argument("--devices", metavar="N", type=int, default=4, help=words)
    words = "rows of the first batch (8)"
    parser.add_argument("--rows", metavar="N", type=int, default=8, help=words)
    words = "fix all random draws, for layers whose draws depend on the layout; compare the rest"
    parser.add_argument("--without-draws", action="store_true", help=words)
    parser.add_json()
    return parser
