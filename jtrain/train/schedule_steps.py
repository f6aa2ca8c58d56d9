"""Durations of a run's config, converted to steps by the sizes of its experiment's data."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import optax

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.durations import (
    Duration,
    DurationUnits,
    convert_durations,
    convert_part,
    find_durations,
    find_own_steps,
    stays_in_time,
)
from jtrain.core.batches import Batches
from jtrain.errors import ConfigError, UserError
from jtrain.optim import SGD
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import LearningRate
from jtrain.train.experiment import Experiment, RunConfig
from jtrain.train.stages import StageStarts, count_stages, stage_config

PROVISIONAL = 10**6  # steps of a run that ends by the clock, until the time of a step is measured
Build: TypeAlias = Callable[[RunConfig], Experiment]


class ConfigDurations(NamedTuple):
    """The durations of a config, by their keys."""

    written: Mapping[str, Duration]
    seconds: float = 0.0
    """Seconds of a step, by which durations in time were counted."""
    provisional: bool = False
    """Whether the time of a step is not known yet, so that durations in time are a guess."""

    @property
    def unknown(self) -> frozenset[str]:
        """Keys of the durations in time, while these are a guess."""
        timed = (key for key, length in self.written.items() if length.seconds)
        return frozenset(timed if self.provisional else ())


class ResolvedRun(NamedTuple):
    """A config in steps, and its experiment."""

    config: RunConfig
    """The config with a number of steps for each duration."""
    durations: ConfigDurations
    experiment: Experiment
    """The experiment, its optimizer a transformation for the steps of the run."""
    unresolved: Experiment | None = None
    """The experiment as built from the config with its durations; None: its `build` needs steps."""
    starts: StageStarts | None = None
    """Where its stages begin, if it has any."""
    stages: Sequence[Experiment] = ()
    """The experiments of its stages, without an optimizer of their own."""
    lr_factor: LearningRate | None = None
    """Factor of the learning rate that the stages set."""


def resolve_durations(
    config: RunConfig, build: Build, seconds: float = 0.0, unresolved: Experiment | None = None
) -> ResolvedRun:
    """Build the experiment of a config, and count the config's durations in steps.

    The experiment knows how many rows an epoch has and how many tokens a row has. It is built once,
    from the config with its durations as they are, if its `optimizer` is left to be built here
    (`Experiment.optimizer`); else a second time, from the config in steps.

    Args:
        seconds: of a step; 0 while unknown.
        unresolved: the experiment, where an earlier call has built it.

    Raises:
        ConfigError: for a duration that cannot be counted or does not fit the others.
    """
    found = find_durations(config)
    units = {length.unit for length in found.values()}
    clock = jax.process_count() == 1  # several processes save together, and their clocks differ
    facts = DurationUnits(config.batch, steps_per_call=config.steps_divisor, clock=clock)
    timed = {
        key: length
        for key, length in found.items()
        if length.seconds and not stays_in_time(key, length, facts)
    }
    lengths = ConfigDurations(found, seconds, provisional=bool(timed) and not seconds)
    if timed:
        facts = facts._replace(seconds=seconds or _provisional(config, timed))
    asks_data = bool(units & {"epochs", "tokens"}) or bool(config.stages)
    if asks_data or timed:
        unresolved = unresolved or _build_unresolved(config, build)
    if asks_data:
        known = unresolved or _build_provisional(config, build, facts)
        facts = _sized(facts, known)
    starts, built, stages, lr_factor = None, [], [], None
    if config.stages:
        starts, config, built = _count_stages(config, build, facts)
        facts = facts._replace(earlier=tuple(zip(starts.stops, starts.sizes, strict=False)))
        if any(stage.lr != 1 for stage in config.stages):
            lr_factor = starts.lr_factor(config.stages)
    config = convert_durations(config, facts)
    for number, known in enumerate(built):
        with stage_errors(number):
            own = stage_config(config, number)
            of_stage = facts._replace(batch=own.batch)
            stages.append(known or build(convert_durations(own, of_stage)))
    if "evaluate.patience" in found:
        config = _patience_in_evaluations(config, found["evaluate.patience"])
    for key, words in config.problems() if found else ():
        raise ConfigError(f"{key}: {words}")
    unresolved = _unless_made_of_steps(unresolved)
    experiment = unresolved or build(config)
    experiment = _with_optimizer(experiment, config, facts, lr_factor)
    return ResolvedRun(config, lengths, experiment, unresolved, starts, stages, lr_factor)


def _count_stages(
    config: RunConfig, build: Build, facts: DurationUnits
) -> tuple[StageStarts, RunConfig, list[Experiment | None]]:
    """Return where stages begin, and the config with a step for the end of each.

    With them come the stages' experiments; None where one must be built of a number of steps.
    """
    sizes, built = [], []
    for number in range(len(config.stages)):
        with stage_errors(number):
            own = stage_config(config, number)
            unresolved = _build_unresolved(own, build)
            known = unresolved or _build_provisional(own, build, facts)
            built.append(_unless_made_of_steps(unresolved))
            sizes.append(_sized(facts._replace(batch=own.batch), known))
    starts = count_stages(config.stages, [*sizes, facts])
    ends = zip(config.stages, starts.stops, strict=True)
    stages = tuple(dataclasses.replace(stage, until=stop) for stage, stop in ends)
    return starts, dataclasses.replace(config, stages=stages), built


def _sized(facts: DurationUnits, known: Experiment) -> DurationUnits:
    return facts._replace(epoch=steps_per_epoch(known.train), tokens=known.tokens)


@contextlib.contextmanager
def stage_errors(number: int) -> Iterator[None]:
    """Name the stage in an error of the block."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"stages.{number}: {error}") from error


def _build_unresolved(config: RunConfig, build: Build) -> Experiment | None:
    try:
        return build(config)
    except (UserError, TypeError, ValueError):  # it needs a number of steps, or fails with one too
        return None


def _unless_made_of_steps(unresolved: Experiment | None) -> Experiment | None:
    """Return an experiment unless its optimizer was made of steps that may be a duration."""
    made = unresolved and isinstance(unresolved.optimizer, optax.GradientTransformation)
    return None if made else unresolved


def _build_provisional(config: RunConfig, build: Build, facts: DurationUnits) -> Experiment:
    """Build the experiment with made-up steps, to ask how large its data is."""
    probe = dataclasses.replace(config, optimizer=SGD(lr=1.0))
    return build(convert_durations(probe, facts._replace(epoch=1, tokens=1)))


def _with_optimizer(
    experiment: Experiment,
    config: RunConfig,
    facts: DurationUnits,
    lr_factor: LearningRate | None,
) -> Experiment:
    optimizer = experiment.optimizer
    if lr_factor is not None and not isinstance(optimizer, OptimizerConfig):
        raise ConfigError(
            f"stages: lr sets the rate of the config's optimizer, and experiment "
            f"{config.experiment} builds one itself. Write optimizer=self.optimizer in `build`, or "
            f"leave lr out of the stages."
        )
    if isinstance(optimizer, OptimizerConfig):
        resolved = convert_part(optimizer, "optimizer", facts, config.steps)
        optimizer = resolved.build(config.steps, experiment.dims, lr_factor=lr_factor)
    elif not isinstance(optimizer, optax.GradientTransformation) and callable(optimizer):
        optimizer = optimizer(config.steps)
    return dataclasses.replace(experiment, optimizer=optimizer)


def steps_per_epoch(batches: Batches) -> int:
    """Return the rows of an epoch, without those dropped and with those padded at its end."""
    rows, size = getattr(batches, "rows", 0), batches.size
    rows_used = {"drop": rows // size * size, "pad": -(-rows // size) * size}
    return rows_used.get(getattr(batches, "end", "cross"), rows)


def _provisional(config: RunConfig, timed: Mapping[str, Duration]) -> float:
    """Return seconds a step by which a run that ends by the clock has `PROVISIONAL` steps."""
    if "steps" not in timed:
        return max(length.seconds for length in timed.values())
    lasts = timed["steps"]
    own = [key for key, part in find_own_steps(config).items() if part.steps]  # as long as they say
    for key, length in timed.items():
        if any(key.startswith(f"{part}.") for part in own):
            continue
        if key.startswith("optimizer") and length.seconds >= lasts.seconds:
            raise ConfigError(
                f"{key}: {length} is no shorter than the run, which lasts {lasts}. Lower it "
                f"({key}=10%), or raise steps."
            )
    return lasts.seconds / PROVISIONAL


def _patience_in_evaluations(config: RunConfig, patience: Duration) -> RunConfig:
    asked, goal = config.evaluate, BestMetric.parse(config.checkpoint.best)
    name = goal.set_name if goal else ""
    every = asked.sets[name].every if name in asked.sets else asked.every
    if not every:
        raise ConfigError(
            f"evaluate.patience: {patience} is counted by evaluations, and the only one is at the "
            f"end. Set {f'evaluate.sets.{name}' if name in asked.sets else 'evaluate'}.every."
        )
    evaluate = dataclasses.replace(asked, patience=-(-asked.patience // every))
    return dataclasses.replace(config, evaluate=evaluate)
