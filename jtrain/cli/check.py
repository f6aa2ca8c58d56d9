"""`jtrain check CONFIG`: check that the split of a batch does not change what a config trains."""

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error, resolve_config
from jtrain.cli.output import print_text as print
from jtrain.errors import FAULT, UserError
from jtrain.inspect.plan.topology import prepare_environment

if TYPE_CHECKING:
    from jtrain.testing.case import LossCase
    from jtrain.train.experiment import RunConfig

NOISE_STD = 0.02  # of the noise added to the initial parameters
PROGRESS_SECONDS = 5.0  # between lines about the progress
INSPECTED_ROWS = 4096  # whose labels and tokens are inspected


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


def build_loss_case(config: "RunConfig", rows: int, *, draws: bool = True) -> "LossCase":
    """Return the loss of a config, `rows` rows of its first batch and its initial parameters.

    Noise is added to the parameters, so that those initialized to zero take part.

    Args:
        draws: whether the random draws of the loss are compared, too.

    Raises:
        UserError: if the config cannot be assembled on one device.
    """
    import jax

    from jtrain.inspect.debug.single_device import set_up_single_device
    from jtrain.testing import build_case, place_loss
    from jtrain.train.experiment import build_experiment

    program = set_up_single_device(config)
    experiment, resolved_config = program.resolved.experiment, program.resolved.config
    state, train = program.initial_state(), experiment.train
    batch = {name: array[:rows] for name, array in train[0].items()}

    def more_batches():
        for step in range(-(-INSPECTED_ROWS // train.size)):
            yield train[step]

    description = (
        f"{config.name or 'the config'}: {len(batch['row'])} of the {train.size} rows of its "
        f"first batch; the full model, noise of {NOISE_STD} on its initial parameters; in float32"
    )
    return build_case(
        place_loss(lambda place: build_experiment(resolved_config, place).loss),
        _add_noise(jax.device_get(state.params)),
        batch,
        extra=jax.device_get(state.extra),
        optimizer=experiment.transformation,
        rows_interact=experiment.rows_interact,
        dims=experiment.dims,
        seed=config.seed,
        draws=draws,
        more_batches=more_batches,
        source=description,
    )


def _add_noise(params):
    """Return the parameters with normal noise added to each number."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    add_noise = lambda x: (x + NOISE_STD * rng.standard_normal(np.shape(x))).astype(x.dtype)
    return jax.tree.map(add_noise, params)


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
