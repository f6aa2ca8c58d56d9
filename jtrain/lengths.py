"""How many steps each duration of a run's config lasts, once its experiment is known."""

import dataclasses
from collections.abc import Mapping

import jax

from jtrain.durations import Duration, Facts, durations, settled
from jtrain.errors import ConfigError
from jtrain.experiment import RunConfig
from jtrain.optim import SGD
from jtrain.types import Batches, Placement


def in_steps(config: RunConfig, place: Placement) -> tuple[RunConfig, Mapping[str, str]]:
    """The config with steps for durations, and these by key.

    What an epoch is, and how many tokens a row has, the experiment knows: it is built once to ask.
    """
    found = durations(config)
    units = {length.unit for length in found.values()}
    facts = Facts(batch=config.batch, steps_per_call=config.steps_per_call)
    if units & {"epochs", "tokens"}:
        probe = dataclasses.replace(config, optimizer=SGD(lr=1.0))
        probe = settled(probe, facts._replace(epoch=1, tokens=1))  # any steps will do
        asked = probe.build(place)
        facts = facts._replace(epoch=epoch(asked.train), tokens=asked.tokens)
    config = settled(config, facts)
    if isinstance(config.checkpoint.every, Duration) and jax.process_count() > 1:
        raise ConfigError(
            f"checkpoint.every: {config.checkpoint.every} is by the clock, and "
            f"{jax.process_count()} processes, which save together, have as many. Write "
            f"checkpoint.every=500, in steps."
        )
    for key, words in config.misfits() if found else ():
        raise ConfigError(f"{key}: {words}")
    return config, found


def epoch(batches: Batches) -> int:
    """Places an epoch: its rows, with what is dropped or filled up at its end."""
    rows, size = getattr(batches, "rows", 0), batches.size
    whole = {"drop": rows // size * size, "pad": -(-rows // size) * size}
    return whole.get(getattr(batches, "end", "cross"), rows)
