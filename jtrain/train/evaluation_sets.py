"""Whether what a config says of evaluations fits the sets that its experiment is judged by."""

import re
from collections.abc import Iterable, Mapping, Sequence

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.suggestions import did_you_mean
from jtrain.errors import ConfigError
from jtrain.train.experiment import RunConfig


def check_names(config: RunConfig, sets: Iterable[str]) -> None:
    """Makes sure that the sets which the config names are there, and that all can be told apart.

    Raises:
        ConfigError: if not.
    """
    for name in sets:
        if not name.isidentifier():
            raise ConfigError(
                f"The evaluation set {name!r} has no plain name, and metrics are written as "
                f"NAME/loss: call it {re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') or 'valid'}."
            )
    for name in config.evaluate.sets:
        if name not in sets:
            there = ", ".join(sets) or "none"
            raise ConfigError(
                f"evaluate.sets.{name} is no set of experiment {config.experiment}, which "
                f"gives {there}{did_you_mean(name, sets) or '; leave it out'}"
            )


def check_best(best: str, metrics: Mapping[str, Sequence[str]]) -> None:
    """Makes sure that `checkpoint.best` is among the metrics of each set, the first set first.

    Raises:
        ConfigError: if not.
    """
    goal = BestMetric.parse(best)
    first = next(iter(metrics.values()), ())
    names = [*first, *(f"{name}/{metric}" for name, each in metrics.items() for metric in each)]
    if goal and goal.name not in names:
        short = [name for name in names if len(metrics) > 1 or "/" not in name]
        found = f"gives {', '.join(short)}" if names else "there is none: it has no `valid`"
        near = did_you_mean(goal.name, names)
        raise ConfigError(
            f"checkpoint.best={best}: {goal.name} is no metric of the "
            f"evaluation, which {found}{near or '; write checkpoint.best=loss'}"
        )
