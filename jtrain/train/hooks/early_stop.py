"""Ends a run that learns no more."""

import copy
import math
from collections.abc import Mapping, Sequence

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.suggestions import did_you_mean
from jtrain.core.loop import Hook, Stop
from jtrain.errors import ConfigError, LossError
from jtrain.train.hooks.evaluation import Results


class EarlyStop(Hook):
    """Ends a run after `patience` evaluations in a row that were no better than the best one.

    The end is a wanted one: the run is done. It keeps nothing in mind, but judges by all results
    that there are, so that a run which is stopped and goes on ends at the same step. A run that it
    ended and that is then trained longer has `patience` evaluations more to be better in.

    Args:
        metric: `loss`, `lowest loss` or `highest accuracy`; of one of several sets `NAME/loss`.
            Without a name, of the first.
        patience: evaluations.
        least: what counts as better: by more than this.
        after: it does not end a run before this step.

    Raises:
        ConfigError: if patience is below 1 or no metric is named.
        LossError: at the first evaluation, if it has no such metric.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 5, *, least: float = 0.0, after: int = 0
    ):
        goal = BestMetric.parse(metric)
        if goal is None or patience < 1 or least < 0:
            raise ConfigError(
                f'EarlyStop("{metric}", patience={patience}, least={least}) waits for nothing: '
                f'name a metric, and a patience of 1 or more: EarlyStop("loss", patience=5).'
            )
        self.of, _, self.metric = goal.name.rpartition("/")
        """The set that it hears of, empty for the first; and the number that it waits for."""
        self._sign = 1 if goal.end == "lowest" else -1
        self._patience, self._least, self._after = patience, least, after
        self._extended: Sequence[int] = ()

    def extended(self, steps: Sequence[int]) -> "EarlyStop":
        """Return the same hook for a run that was made longer after each of these steps, in order.

        Where the patience was over by such a step, it is counted anew from there.
        """
        other = copy.copy(self)
        other._extended = tuple(steps)
        return other

    def on_results(self, step: int, name: str, results: Results) -> Stop | None:
        """Counts the evaluations since the best."""
        if self.metric not in results[step]:
            near = did_you_mean(self.metric, results[step])
            raise LossError(
                f"EarlyStop waits for {self.metric}, and the evaluation on {name} has "
                f"{', '.join(results[step])}{near or '; name one of them'}."
            )
        found = {at: x[self.metric] for at, x in results.items() if self.metric in x}
        best, since = self._best(found)
        if since < self._patience or step < self._after:
            return None
        return Stop(
            f"{name}/{self.metric} was no better in {since} evaluations than at step {best}",
            "finished",
        )

    def _best(self, found: Mapping[int, float]) -> tuple[int, int]:
        """The step of the best number, and how many came after it."""
        step, value, since = 0, math.inf, 0
        for (at, number), following in zip(found.items(), [*found, math.inf][1:], strict=True):
            if self._sign * number < value - self._least:  # never of a NaN
                step, value, since = at, self._sign * number, 0
            else:
                since += 1
            over = since >= self._patience
            if over and any(at <= extended < following for extended in self._extended):
                since = 0
        return step, since
