"""How many steps each duration of a run's config lasts, once its experiment is known."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.durations import (
    Duration,
    DurationUnits,
    by_the_clock,
    durations,
    own_lengths,
    settled,
)
from jtrain.core.batches import Batches
from jtrain.core.placement import Placement
from jtrain.errors import ConfigError
from jtrain.optim import SGD
from jtrain.train.experiment import RunConfig, build_experiment

PROVISIONAL = 10**6  # steps of a run that ends by the clock, until it is known what a step takes


class ConfigDurations(NamedTuple):
    """The durations of a config, by their keys."""

    said: Mapping[str, Duration]
    """As they were written."""
    seconds: float = 0.0
    """What a step takes, as those in time were counted."""
    provisional: bool = False
    """Whether it takes that is not known, so that the steps for them are as good as any."""


def resolve_durations(
    config: RunConfig, place: Placement, seconds: float = 0.0
) -> tuple[RunConfig, ConfigDurations]:
    """The config with steps for durations, and what these were.

    What an epoch is, and how many tokens a row has, the experiment knows: it is built once to ask.

    Args:
        seconds: that a step takes; 0: nobody knows yet.

    Raises:
        ConfigError: for a duration that cannot be counted or does not fit the others.
    """
    found = durations(config)
    units = {length.unit for length in found.values()}
    clock = jax.process_count() == 1  # several save together, and have as many clocks
    facts = DurationUnits(config.batch, steps_per_call=config.steps_per_call, clock=clock)
    timed = {
        key: length
        for key, length in found.items()
        if length.seconds and not by_the_clock(key, length, facts)
    }
    lengths = ConfigDurations(found, seconds, provisional=bool(timed) and not seconds)
    if timed:
        facts = facts._replace(seconds=seconds or _provisional(config, timed))
    if units & {"epochs", "tokens"}:
        probe = dataclasses.replace(config, optimizer=SGD(lr=1.0))
        probe = settled(probe, facts._replace(steps_per_epoch=1, tokens=1))  # any steps will do
        asked = build_experiment(probe, place)
        facts = facts._replace(steps_per_epoch=steps_per_epoch(asked.train), tokens=asked.tokens)
    config = settled(config, facts)
    if "evaluate.patience" in found:
        config = _patient(config, found["evaluate.patience"])
    for key, words in config.misfits() if found else ():
        raise ConfigError(f"{key}: {words}")
    return config, lengths


def steps_per_epoch(batches: Batches) -> int:
    """Places an epoch: its rows, with what is dropped or filled up at its end."""
    rows, size = getattr(batches, "rows", 0), batches.size
    whole = {"drop": rows // size * size, "pad": -(-rows // size) * size}
    return whole.get(getattr(batches, "end", "cross"), rows)


def _provisional(config: RunConfig, timed: Mapping[str, Duration]) -> float:
    """Seconds a step by which a run that ends by the clock has many steps, and all else fits it."""
    if "steps" not in timed:
        return max(length.seconds for length in timed.values())
    lasts = timed["steps"]
    own = [key for key, part in own_lengths(config).items() if part.steps]  # as long as they say
    for key, length in timed.items():
        if any(key.startswith(f"{part}.") for part in own):
            continue
        if key.startswith("optimizer") and length.seconds >= lasts.seconds:
            raise ConfigError(
                f"{key}: {length} is no shorter than the run, which lasts {lasts}. Lower it "
                f"({key}=10%), or raise steps."
            )
    return lasts.seconds / PROVISIONAL


def _patient(config: RunConfig, said: Duration) -> RunConfig:
    """The config with a patience in evaluations, as many as its steps take."""
    asked, goal = config.evaluate, BestMetric.parse(config.checkpoint.best)
    name = goal.name.rpartition("/")[0] if goal else ""
    every = asked.sets[name].every if name in asked.sets else asked.every
    if not every:
        raise ConfigError(
            f"evaluate.patience: {said} is counted by evaluations, and there is only the one at "
            f"the end. Set {f'evaluate.sets.{name}' if name in asked.sets else 'evaluate'}.every."
        )
    evaluate = dataclasses.replace(asked, patience=-(-asked.patience // every))
    return dataclasses.replace(config, evaluate=evaluate)
