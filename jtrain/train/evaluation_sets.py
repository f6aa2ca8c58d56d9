"""Checks of evaluation settings against the evaluation sets of the experiment."""

import re
from collections.abc import Iterable, Mapping, Sequence

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.suggestions import did_you_mean
from jtrain.errors import ConfigError
from jtrain.train.experiment import RunConfig


def check_set_names(config: RunConfig, sets: Iterable[str]) -> None:
    """Raise unless each set has a plain name and the config names existing sets only.

    Raises:
        ConfigError: if a name is not an identifier, or there is no such set.
    """
    for name in sets:
        if not name.isidentifier():
            raise ConfigError(
                f"The evaluation set {name!r} has no plain name, and metrics are written as "
                f"NAME/loss: use {re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') or 'valid'}."
            )
    for name in config.evaluate.sets:
        if name not in sets:
            names = ", ".join(sets) or "none"
            raise ConfigError(
                f"evaluate.sets.{name} is no set of experiment {config.experiment}, which "
                f"has {names}{did_you_mean(name, sets) or '; remove it'}"
            )


def check_best(best: str, metrics: Mapping[str, Sequence[str]]) -> None:
    """Raise unless `checkpoint.best` is among the metrics of the sets, by set, first set first.

    Raises:
        ConfigError: if it is no metric.
    """
    goal = BestMetric.parse(best)
    first = next(iter(metrics.values()), ())
    names = [*first, *(f"{name}/{metric}" for name, each in metrics.items() for metric in each)]
    if goal and goal.name not in names:
        short = [name for name in names if len(metrics) > 1 or "/" not in name]
        found = f"has {', '.join(short)}" if names else "has none: there is no `valid`"
        near = did_you_mean(goal.name, names)
        raise ConfigError(
            f"checkpoint.best={best}: {goal.name} is no metric of the "
            f"evaluation, which {found}{near or '; write checkpoint.best=loss'}"
        )
