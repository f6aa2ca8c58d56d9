"""A run that was trained before, used: measured, asked to write, given back."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax

from jtrain.checkpoint import CheckpointManager
from jtrain.core.state import TrainState
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError
from jtrain.train.available_layout import usable
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.experiment import Prompt, RunConfig
from jtrain.train.longer_run import keep_lengths, lengths
from jtrain.train.multihost_checks import join
from jtrain.train.run_config_check import MAY_DIFFER, check_about
from jtrain.train.run_dir import RunDir
from jtrain.train.setup import TrainSetup, set_up

Tell: TypeAlias = Callable[[str], None]
Step: TypeAlias = int | Literal["newest", "best"]


def measure(
    config: RunConfig, directory: Path, step: Step = "newest", tell: Tell = lambda line: None
) -> tuple[int, Mapping[str, Mapping[str, float]]]:
    """A step of the run in a directory, and by set its metrics over the whole of it.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: if the values are not those of the run, or it has no validation set.
    """
    parts, there = in_use(config, directory, tell)
    if not parts.sets:
        raise ConfigError(f"experiment {config.experiment} gives no `valid` to measure a run by.")
    found, state = _restored(parts, there, step)
    return found, {name: parts.measure(state, name) for name in parts.sets}


def complete(
    config: RunConfig,
    directory: Path,
    prompt: Prompt,
    *,
    seed: int = 0,
    step: Step = "newest",
    tell: Tell = lambda line: None,
) -> tuple[int, str]:
    """A step of the run in a directory, and a text in its hand.

    The prompt goes to the experiment's `complete`; one that has only `sample` takes none.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: if the values are not those of the run, or the experiment writes no text.
        DataError: if the experiment's data does not know what the prompt says.
    """
    parts, there = in_use(config, directory, tell)
    x = parts.experiment
    if x.complete is None and x.sample is None:
        raise ConfigError(
            f"experiment {config.experiment} writes nothing: it gives no `complete` and no "
            f"`sample`. Give it one: jt.Experiment(..., complete=lambda params, extra, key, "
            f"prompt: text)."
        )
    if x.complete is None and prompt.text:
        raise ConfigError(
            f"experiment {config.experiment} takes no prompt: it gives a `sample` and no "
            f"`complete`. Leave the prompt out."
        )
    found, state = _restored(parts, there, step)
    params, extra, _ = parts.here(state)
    known = params, extra, jax.random.key(seed)
    if x.complete is not None:
        return found, x.complete(*known, prompt)
    assert x.sample is not None, "one of the two is there"
    return found, x.sample(*known)


def trained(
    config: RunConfig, directory: Path, step: Step = "newest", tell: Tell = lambda line: None
) -> tuple[int, TrainSetup, TrainState]:
    """A step of the run in a directory, the parts of the run, and the state after that step.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: if the values are not those of the run.
    """
    parts, there = in_use(config, directory, tell)
    found, state = _restored(parts, there, step)
    return found, parts, state


def in_use(config: RunConfig, directory: Path, tell: Tell) -> tuple[TrainSetup, RunDir]:
    """Return the parts of a run, on the devices that are there, and where the run lies.

    Where its own layout does not fit them, another is taken and told of.

    Raises:
        ConfigError: if the values are not those of the run.
    """
    config, there = _joined(config, directory)
    config, line = usable(config, there.stored(type(config)))
    if line and there.first:
        tell(f"{directory}: {line}")
    return _assembled(config, there), there


def again(config: RunConfig, directory: Path) -> tuple[TrainSetup, RunDir]:
    """The parts of a run that was trained before, in its own layout, and where it lies.

    Raises:
        ConfigError: if the values are not those of the run.
    """
    config, there = _joined(config, directory)
    return _assembled(config, there), there


def _joined(config: RunConfig, directory: Path) -> tuple[RunConfig, RunDir]:
    """The values and the directory of a run, once its processes have met and its values agree."""
    keep_compiled_programs()
    there = RunDir(directory, process=join(config, directory, trains=False).index)
    config = keep_lengths(config, there.stored(type(config)))
    # A run that is made longer has its new lengths in config.yaml before a checkpoint has them.
    there.refuse_another(config, functools.partial(_advice, there), also=lengths(config))
    return config, there


def _assembled(config: RunConfig, there: RunDir) -> TrainSetup:
    parts = set_up(config, there.pace)
    there.refuse_another_tokenizer(parts.experiment.tokenizer)
    return parts


def _advice(there: RunDir, settings: str) -> str:
    leave = f"Leave them as they are; {', '.join(MAY_DIFFER)} may differ."
    edited = f"\n{there.config} was changed since it was trained. Its values are typed: {settings}"
    return leave + edited * bool(settings)


def _restored(parts: TrainSetup, there: RunDir, step: Step) -> tuple[int, TrainState]:
    best, owner = parts.config.checkpoint.best, there.owner()
    with CheckpointManager(there.checkpoints, best=best, owner=owner) as checkpoints:
        named = {"newest": checkpoints.newest, "best": checkpoints.best}

        def look() -> dict[str, Any]:
            found = named[step]() if isinstance(step, str) else step
            return {"found": found, "steps": checkpoints.steps()}

        seen = broadcast_from_first(look)  # a run that goes on may save another one meanwhile
        found, steps = seen["found"], seen["steps"]
        if found is None and not steps:
            raise CheckpointError(
                f"{there.checkpoints} has no checkpoint: no state of this run was saved. Train it: "
                f"jtrain run {there.config}"
            )
        if found is None:
            raise CheckpointError(
                f"{there.checkpoints} has no {step} checkpoint; it has steps {steps}. The best is "
                f"kept where checkpoint.best names a metric."
            )
        where = there.checkpoints / str(found)
        about, also = checkpoints.about(found), lengths(parts.config)
        check_about(about, parts.config, where, _advice(there, ""), also=also)
        return found, checkpoints.restore(found, parts.like)
