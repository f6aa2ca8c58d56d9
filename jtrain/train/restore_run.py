"""Restored run: a trained run is evaluated, completes a prompt, or is returned with its state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax

from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.pinned import raise_removed
from jtrain.core.state import TrainState
from jtrain.distributed.compiler_flags import VARIABLES
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError, UserError
from jtrain.parallel import FSDP, Auto, Layout, Mirrored, Single, check_divides
from jtrain.train.code_digest import digest_code, find_edited
from jtrain.train.compilation_cache import enable_compilation_cache
from jtrain.train.experiment import Prompt, RunConfig
from jtrain.train.multihost_checks import join_run
from jtrain.train.run_config_check import MAY_DIFFER, MatchedConfig
from jtrain.train.run_dir import RunDir
from jtrain.train.setup import TrainSetup, set_up

Log: TypeAlias = Callable[[str], None]
Step: TypeAlias = int | Literal["newest", "best"]


def fit_layout_to_devices(config: RunConfig, stored: RunConfig | None) -> tuple[RunConfig, str]:
    """Return the config with a layout that fits, and a line about it if the layout changed.

    A given layout other than the run's own is not changed.

    Args:
        stored: the config that the run was trained with.
    """
    if stored is None or config.parallel != stored.parallel or _fits(config.parallel, config):
        return config, ""
    for count in range(jax.local_device_count(), 0, -1):
        layout = _over(count, config)
        if _fits(layout, config):
            return dataclasses.replace(config, parallel=layout), (
                f"trained under parallel.kind={config.parallel.kind}, which does not fit the "
                f"{jax.device_count()} device{'s' * (jax.device_count() > 1)} here: used as "
                f"{layout.kind} over {count * jax.process_count()}"
            )
    return config, ""


def _over(count: int, config: RunConfig) -> Layout:
    """Return a layout over `count` devices of each process; a sharded state stays sharded."""
    timeout = config.parallel.start_timeout
    if count * jax.process_count() == 1:
        return Single(start_timeout=timeout)
    kind = FSDP if config.parallel.splits_state else Mirrored
    return kind(devices=count, start_timeout=timeout)


def _fits(layout: Layout | Auto, config: RunConfig) -> bool:
    """Return whether there are enough devices, and the rows of a batch divide by them."""
    if isinstance(layout, Auto):  # chooses a layout that fits
        return True
    try:
        shares = layout.build().shares
        check_divides(config.batch, shares, config.microbatches)
        check_divides(config.evaluate.batch or config.batch, shares, 1)
    except UserError:
        return False
    return True


def evaluate_run(
    config: RunConfig, directory: Path, step: Step = "newest", log: Log = lambda line: None
) -> tuple[int, Mapping[str, Mapping[str, float]]]:
    """Return a step of a run, and its metrics over each evaluation set, by set.

    Raises:
        CheckpointError: if the run has no such checkpoint.
        ConfigError: if the values are not those of the run, or it has no evaluation set.
    """
    setup, run_dir = set_up_on_devices(config, directory, log)
    if not setup.sets:
        raise ConfigError(f"experiment {config.experiment} has no `valid` to evaluate a run on.")
    found, state = _restore(setup, run_dir, step)
    return found, {name: setup.measure(state, name) for name in setup.sets}


def complete_prompt(
    config: RunConfig,
    directory: Path,
    prompt: Prompt,
    *,
    seed: int = 0,
    step: Step = "newest",
    log: Log = lambda line: None,
) -> tuple[int, str]:
    """Return a step of a run, and a text that its model generates.

    The prompt goes to the experiment's `complete`; an experiment with only `sample` takes none.

    Raises:
        CheckpointError: if the run has no such checkpoint.
        ConfigError: if the values are not those of the run, or the experiment generates no text.
        DataError: if the experiment's tokenizer cannot encode the prompt.
    """
    setup, run_dir = set_up_on_devices(config, directory, log)
    x = setup.experiment
    if x.complete is None and x.sample is None:
        raise ConfigError(
            f"experiment {config.experiment} generates no text: it has no `complete` and no "
            f"`sample`. Add one: jt.Experiment(..., complete=lambda params, extra, key, prompt: "
            f"text)."
        )
    if x.complete is None and prompt.text:
        raise ConfigError(
            f"experiment {config.experiment} takes no prompt: it has a `sample` and no "
            f"`complete`. Omit the prompt."
        )
    found, state = _restore(setup, run_dir, step)
    params, extra, _ = setup.gather_weights(state)
    key = jax.random.key(seed)
    if x.complete is not None:
        return found, x.complete(params, extra, key, prompt)
    assert x.sample is not None, "checked above"
    return found, x.sample(params, extra, key)


def restore_run(
    config: RunConfig, directory: Path, step: Step = "newest", log: Log = lambda line: None
) -> tuple[int, TrainSetup, TrainState]:
    """Return a step of a run, the run's setup, and the state after that step.

    Raises:
        CheckpointError: if the run has no such checkpoint.
        ConfigError: if the values are not those of the run.
    """
    setup, run_dir = set_up_on_devices(config, directory, log)
    found, state = _restore(setup, run_dir, step)
    return found, setup, state


def set_up_on_devices(config: RunConfig, directory: Path, log: Log) -> tuple[TrainSetup, RunDir]:
    """Return the setup of a run on the available devices, and its directory.

    If the run's own layout does not fit the devices, another one is used, and logged.

    Raises:
        ConfigError: if the values are not those of the run.
    """
    matched, run_dir = _join(config, directory)
    config, line = fit_layout_to_devices(matched.config, matched.stored)
    if line and run_dir.first:
        log(f"{directory}: {line}")
    return _build(config, run_dir), run_dir


def set_up_stored(config: RunConfig, directory: Path) -> tuple[TrainSetup, RunDir]:
    """Return the setup of a trained run, in its own layout, and its directory.

    Raises:
        ConfigError: if the values are not those of the run.
    """
    matched, run_dir = _join(config, directory)
    return _build(matched.config, run_dir), run_dir


def _join(config: RunConfig, directory: Path) -> tuple[MatchedConfig[RunConfig], RunDir]:
    """Join the processes, and match the config with the run in the directory."""
    enable_compilation_cache()
    run_dir = RunDir(directory, process=join_run(config, directory, trains=False).index)
    return run_dir.match(config, functools.partial(_advice, run_dir)), run_dir


def _build(config: RunConfig, run_dir: RunDir) -> TrainSetup:
    setup = set_up(config, run_dir.pace)
    run_dir.check_tokenizer(setup.experiment.tokenizer)
    return setup


def _advice(run_dir: RunDir, settings: str) -> str:
    keep = f"Leave them as they are; {', '.join(MAY_DIFFER)} may differ."
    if not settings:
        return keep
    return f"{keep}\n{run_dir.config} was edited. For the values of the run type: {settings}"


def _restore(setup: TrainSetup, run_dir: RunDir, step: Step) -> tuple[int, TrainState]:
    best, owner = setup.config.checkpoint.best, run_dir.owner()
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
            return found, checkpoints.restore(found, setup.like)
        except CheckpointError:
            if found in steps:
                raise_removed(run_dir.checkpoints, found)  # by a run that goes on meanwhile
            raise


def resume_advice(run_dir: RunDir, name: str, another: str, again: str, settings: str) -> str:
    """Return what to type if the stored run has other values.

    Args:
        name: of the run, by its config.
        another: the command that starts another run.
        again: the command that resumes the run, if one was given.
        settings: typed after config.yaml to get the values of the run; mostly empty.
    """
    if again:
        command = f"{again}, with the values of that run"
    else:  # by its own name, since it may be a copy of another run
        command = f"{run_dir.resume_command} name={name} {settings}".rstrip()
    return f"Start a new run: {another}\nor resume that one: {command}"


def describe_copy(run_dir: RunDir, identity: Mapping[str, Any]) -> list[str]:
    """Return a line if the run's directory is a copy of another run's, or was moved."""
    known = run_dir.facts()
    if known.get("id", identity["id"]) == identity["id"]:
        return []
    return [
        f"{run_dir.path} was copied or moved from {known.get('place', 'another place')}: it is a "
        f"separate run from now on"
    ]


def describe_code(run_dir: RunDir, root: Any, another: str) -> list[str]:
    """Return a line if the code of a run, its `root`, was edited since its last start."""
    edited = find_edited(run_dir.facts().get("code"), digest_code(root))
    line = (
        f"the code of the run was edited since its last start: {', '.join(edited)}. Steps that "
        f"were taken are of the old code; to train the new code alone: {another}"
    )
    return [line] if edited else []


def describe_flags(run_dir: RunDir, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of the compiler that differs from the run's last start."""
    known = run_dir.facts().get("flags")
    if not isinstance(known, dict):  # a new run
        return []
    return [
        f"{name} was {known.get(name) or 'not set'}, and is {environ.get(name) or 'not set'}: the "
        f"last bits of results may differ"
        for name in VARIABLES
        if known.get(name, "") != environ.get(name, "")
    ]


def describe_missing_checkpoint(
    run_dir: RunDir, checkpoints: CheckpointManager, start: int | None
) -> list[str]:
    """Return a line if the checkpoint in run.json is missing and no other line mentions it."""
    facts = run_dir.facts()
    saved = facts.get("status") in {"running", "stopped", "done"}  # its step is a checkpoint's
    step = facts.get("step", 0) if saved else 0
    if step <= (start or 0) or any(f"checkpoint {step} " in line for line in checkpoints.notices):
        return []
    return [f"checkpoint {step}, which {run_dir.status} names, is missing"]
