"""`jtrain check CONFIG`: does the split of a batch change what a config trains?"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.arguments import Arguments
from jtrain.errors import FAULT, UserError
from jtrain.inspect.plan.topology import prepare

if TYPE_CHECKING:
    from jtrain.testing.case import LossCase
    from jtrain.train.experiment import RunConfig

MOVED = 0.02  # the deviation of what is added to the first parameters
READ = 4096  # rows whose labels and tokens are looked at


def main(argv: Sequence[str]) -> int:
    """Compares and prints; gives the exit code: 0 one result, 70 it depends on the split."""
    parser = _arguments()
    typed = parser.parse(argv)
    path, words = parser.config_and_words(typed.words)
    for name, least in {"devices": 1, "rows": 2}.items():
        if getattr(typed, name) < least:
            raise UserError(
                f"jtrain check: --{name} {getattr(typed, name)} is too few to split; write "
                f"--{name} 8, or at least {least}."
            )
    prepare(f"cpu:{typed.devices}")
    # With LLVM at -O0 a check takes 0.73 of the time; XLA's own passes, fusion among them, stay.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

    from jtrain.config.resolve import resolve
    from jtrain.testing import check

    resolved = resolve(Path(path), words)
    for note in resolved.notes:
        print(note, file=sys.stderr)
    of = subject_of(resolved.config, typed.rows, draws=not typed.without_draws)
    report = check(of, most=typed.devices, tell=_tell)
    print(json.dumps({"config": path, **report.plain()}) if typed.json else report.told())
    return 0 if report.ok else FAULT


def subject_of(config: "RunConfig", rows: int, *, draws: bool = True) -> "LossCase":
    """The loss of a config, its first batch cut to so many rows, and its first parameters.

    The parameters are moved a little, so that what begins as zero takes part. `draws`: whether what
    the loss draws is compared, too.

    Raises:
        UserError: if the config cannot be assembled on one device.
    """
    import jax

    from jtrain.inspect.debug.single_device_step import alone
    from jtrain.testing import placed, subject
    from jtrain.train.experiment import build_experiment

    parts = alone(config)
    x, settled, state = parts.experiment, parts.config, parts.fresh()
    batch = {name: array[:rows] for name, array in x.train[0].items()}

    def further():
        for step in range(-(-READ // x.train.size)):
            yield x.train[step]

    said = (
        f"{config.name or 'the config'}: its first batch, {len(batch['row'])} of "
        f"{x.train.size} rows; the model whole, its first parameters moved by {MOVED}; in float32"
    )
    return subject(
        placed(lambda place: build_experiment(settled, place).loss),
        _moved(jax.device_get(state.params)),
        batch,
        extra=jax.device_get(state.extra),
        optimizer=x.optimizer,
        couples=x.couples,
        dims=x.dims,
        seed=config.seed,
        draws=draws,
        compute=config.precision.compute,
        further=further,
        said=said,
    )


def _moved(params):
    """Each number with a normal draw added."""
    import jax
    import numpy as np

    draw = np.random.default_rng(0)

    def leaf(x):
        return (x + MOVED * draw.standard_normal(np.shape(x))).astype(x.dtype)

    return jax.tree.map(leaf, params)


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"comparing: {line}", file=sys.stderr, flush=True)


def _arguments() -> Arguments:
    parser = Arguments(
        "check",
        "Compares the loss, the gradient and the next state of a config under every split of a\n"
        "batch (rows, microbatches, padding, masks, strategies) with one device, in float32 and\n"
        "where that leaves it open in float64. Says what in the loss is wrong. Trains nothing.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml model.layers=2 --devices 8",
        "configs/vae.yaml --rows 16 --json",
    )
    words = "a YAML file, values to change"
    parser.add_argument("words", metavar="CONFIG [KEY=VALUE]", nargs="*", help=words)
    words = "parts that the CPU is cut into (4)"
    parser.add_argument("--devices", metavar="N", type=int, default=4, help=words)
    words = "rows of the first batch that are taken (8)"
    parser.add_argument("--rows", metavar="N", type=int, default=8, help=words)
    words = "fix all random draws, where a layer draws by the layout, and compare the rest"
    parser.add_argument("--without-draws", action="store_true", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
