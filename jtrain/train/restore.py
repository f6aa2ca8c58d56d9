"""Restored run: the setup and the state of a trained run, on the devices here."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax

from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.pinned import raise_removed
from jtrain.core.state import TrainState
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError, UserError
from jtrain.parallel import FSDP, Auto, Layout, Mirrored, Single, check_divides
from jtrain.train.experiment import RunConfig
from jtrain.train.processes import join_run
from jtrain.train.program import Program, set_up
from jtrain.train.resume import MAY_DIFFER, match_config
from jtrain.train.run_dir import RunDir
from jtrain.train.runtime import enable_compilation_cache

Log: TypeAlias = Callable[[str], None]
Step: TypeAlias = int | Literal["newest", "best"]


def set_up_stored(
    config: RunConfig, directory: Path, log: Log | None = None
) -> tuple[Program, RunDir]:
    """Return the setup of a trained run, and its directory.

    Args:
        log: takes a line if the run's layout does not fit the devices here, so that another one is
            used; None: the run's layout is used in any case.

    Raises:
        ConfigError: if the values are not those of the run.
    """
    enable_compilation_cache()
    run_dir = RunDir(directory, process=join_run(config, directory, trains=False).index)
    run_dir.pin_models()
    advice = f"Leave them as they are; {', '.join(MAY_DIFFER)} may differ. The run's values: "
    matched = match_config(run_dir, config, lambda settings: advice + settings)
    config, line = matched.config, ""
    if log is not None:
        config, line = fit_layout_to_devices(config, matched.stored)
        if line and run_dir.first:
            log(f"{directory}: {line}")
    program = set_up(config, run_dir.pace)
    run_dir.check_tokenizer(program.resolved.experiment.tokenizer)
    return program, run_dir


def evaluate_run(
    config: RunConfig, directory: Path, step: Step = "newest", log: Log = lambda line: None
) -> tuple[int, Mapping[str, Mapping[str, float]]]:
    """Return a step of a run, and its metrics over each evaluation set, by set.

    Raises:
        CheckpointError: if the run has no such checkpoint.
        ConfigError: if the values are not those of the run, or it has no evaluation set.
    """
    found, program, state = restore_run(config, directory, step, log)
    if not program.resolved.sets:
        raise ConfigError(f"experiment {config.experiment} has no `valid` to evaluate a run on.")
    return found, {name: program.measure(state, name) for name in program.resolved.sets}


def restore_run(
    config: RunConfig, directory: Path, step: Step = "newest", log: Log = lambda line: None
) -> tuple[int, Program, TrainState]:
    """Return a step of a run, the run's program, and the state after that step.

    Raises:
        CheckpointError: if the run has no such checkpoint.
        ConfigError: if the values are not those of the run.
    """
    program, run_dir = set_up_stored(config, directory, log)
    best, owner = config.checkpoint.best, run_dir.owner()
    with CheckpointManager(run_dir.checkpoints, best=best, owner=owner) as checkpoints:
        named = {"newest": checkpoints.newest, "best": checkpoints.best}

        def look() -> dict[str, Any]:
            found = named[step]() if isinstance(step, str) else step
            return {"found": found, "steps": checkpoints.steps()}

        choice = broadcast_from_first(look)  # a running run may save another one meanwhile
        found, steps = choice["found"], choice["steps"]
        if found is None and not steps:
            raise CheckpointError(
                f"{run_dir.checkpoints} has no checkpoint: no state of this run was saved. Train "
                f"it: jtrain run {run_dir.config}"
            )
        if found is None:
            raise CheckpointError(
                f"{run_dir.checkpoints} has no {step} checkpoint; it has steps {steps}. The best "
                f"one is kept if checkpoint.best names a metric."
            )
        try:
            return found, program, checkpoints.restore(found, program.resolved.abstract_state)
        except CheckpointError:
            if found in steps:
                raise_removed(run_dir.checkpoints, found)  # by a run that goes on meanwhile
            raise


def fit_layout_to_devices(config: RunConfig, stored: RunConfig | None) -> tuple[RunConfig, str]:
    """Return the config with a layout that fits, and a line about it if the layout changed.

    A given layout other than the run's own is not changed. A sharded state stays sharded.
    """
    layout, processes = config.parallel, jax.process_count()
    if stored is None or layout != stored.parallel or _fits(layout, config):
        return config, ""
    kind = FSDP if layout.splits_state else Mirrored
    for devices in range(jax.local_device_count(), 0, -1):
        other: Layout = kind(devices=devices, start_timeout=layout.start_timeout)
        if devices * processes == 1:
            other = Single(start_timeout=layout.start_timeout)
        if _fits(other, config):
            return dataclasses.replace(config, parallel=other), (
                f"trained under parallel.kind={layout.kind}, which does not fit the "
                f"{jax.device_count()} device{'s' * (jax.device_count() > 1)} here: used as "
                f"{other.kind} over {devices * processes}"
            )
    return config, ""


def _fits(layout: Layout | Auto, config: RunConfig) -> bool:
    if isinstance(layout, Auto):  # chooses a layout that fits
        return True
    try:
        shares = layout.build().shares
        check_divides(config.batch, shares, config.microbatches)
        for stage in config.stages:
            check_divides(stage.set.get("batch", config.batch), shares, 1)
        check_divides(config.evaluate.batch or config.batch, shares, 1)
    except UserError:
        return False
    return True
