"""Failure of a run: the data that explains it, and what to type."""

import dataclasses
import math

from jtrain.config.lookup import FIT
from jtrain.core.loop import Stop
from jtrain.data.batches.scan import describe_nonfinite
from jtrain.distributed.multihost import all_gather
from jtrain.optim.recipe import OptimizerConfig
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStep
from jtrain.train.hooks.bad_steps import BadSteps
from jtrain.train.hooks.guards import FIND
from jtrain.train.run_hooks import Attempt


def explain_failure(run: Attempt, bad_steps: BadSteps, stop: Stop, last: int) -> Stop:
    """Return the `Stop` of a failed run, with the data that explains it.

    Args:
        last: step at which the run ended.
    """
    bad, rows = bad_steps.bad, bad_steps.batches
    window = min(getattr(run.config.guard, "window", 0), run.config.steps)
    first = max(1, last - window - 10 * run.record_every)
    rows_of = lambda step: rows.report(step).get("rows", ())
    blame = describe_nonfinite(rows.train, range(first, last + 1), rows_of)
    if bad:  # in every process, each of which has read rows of its own
        blame = next((each for each in all_gather(blame) if "every value" not in each), blame)
        late = f"It was found at step {last}: numbers are read some calls late. "
        late = late if last > bad.step else ""
        blame = f"{late}{blame} {_advise(run.config, bad, rows.report(bad.step)['batch'])}"
    why = f"{stop.why} {blame}"
    if bad:
        bad_steps.record(bad, "stopped", why=why)
    return dataclasses.replace(stop, why=why)


def _advise(config: RunConfig, bad: BadStep, batch: int) -> str:
    """Return what to type after a bad step that ended a run.

    Args:
        batch: number of the batch that the step took.
    """
    run = f"runs/{config.name}/config.yaml"
    if math.isfinite(bad.loss + bad.grad_norm) and not math.isfinite(bad.update_norm):
        return (
            f"It took batch {batch}, and loss and gradient of that are finite: the update alone "
            f"is not, so the data is not the cause. {_smaller_updates(config, run)}"
        )
    how = f": jtrain run {run} guard.without='[[{batch}, {batch + 1}]]'"
    if config.experiment == FIT:  # no config of it can be run
        how = ', repeat the call with guard="skip"'
    return f"It took batch {batch}. To go on without that batch{how}. {FIND}"


def _smaller_updates(config: RunConfig, run: str) -> str:
    """Return what to type for smaller updates."""
    optimizer = config.optimizer
    if not isinstance(optimizer, OptimizerConfig):  # one that was handed over whole
        return "Lower its learning rate, or clip the gradient: optax.clip_by_global_norm(1.0)."
    lr = f"{min(1e-3, optimizer.lr / 10):g}"
    if config.experiment == FIT:
        return f"Lower the learning rate: repeat the call with lr={lr}."
    clip = "" if optimizer.clip or optimizer.kind == "lbfgs" else " or set optimizer.clip=1.0"
    return (
        f"Lower optimizer.lr{clip}, in a run of its own: jtrain run {run} name={config.name}-2 "
        f"optimizer.lr={lr}"
    )
