"""Early stopping: a run ends when its evaluations stop improving."""

import math
from collections.abc import Mapping, Sequence

from jtrain.checkpoint.retention import BestMetric, check_number
from jtrain.core.loop import Hook, Stop
from jtrain.errors import ConfigError, LossError
from jtrain.errors.plain_numbers import plain_numbers
from jtrain.errors.spelling import did_you_mean
from jtrain.train.hooks.evaluation import Results


class EarlyStop(Hook):
    """Hook that ends a run after `patience` evaluations in a row without improvement.

    The run is then done. The hook has no state of its own: it decides by all results so far, so a
    run that is stopped and resumed ends at the same step. If a run that it ended is trained
    longer, there are `patience` more evaluations to improve in.

    Args:
        metric: `loss`, `lowest loss` or `highest accuracy`; `NAME/loss` for one of several sets.
            Without a set's name, the first set counts.
        patience: evaluations.
        least: an evaluation is better if it improves by more than this.
        after: the run does not end before this step.

    Raises:
        ConfigError: if patience is below 1 or no metric is named.
        LossError: at the first evaluation, if it has no such metric.
    """

    @plain_numbers
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
        """Evaluation set that the hook listens to (empty: the first), and its metric."""
        self._sign = 1 if goal.end == "lowest" else -1
        self._patience, self._least, self._after = patience, least, after
        self.longer_from: Sequence[int] = ()
        """Steps after which the run was trained longer; if the patience had run out by such a
        step, counting restarts there."""

    def on_results(self, step: int, name: str, results: Results) -> Stop | None:
        """Count the evaluations since the best; return a `Stop` when patience runs out."""
        if self.metric not in results[step]:
            near = did_you_mean(self.metric, results[step])
            raise LossError(
                f"EarlyStop waits for {self.metric}, and the evaluation on {name} has "
                f"{', '.join(results[step])}{near or '; name one of them'}."
            )
        check_number(self.metric, results[step][self.metric])
        values = {at: x[self.metric] for at, x in results.items() if self.metric in x}
        best, since = self._best(values)
        if since < self._patience or step < self._after:
            return None
        nans = sum(map(math.isnan, list(values.values())[-since:]))
        why = f"; it was NaN in {nans} of them: lower the learning rate" if nans else ""
        return Stop(
            f"{name}/{self.metric} was no better in {since} evaluations than at step {best}{why}",
            "finished",
        )

    def _best(self, values: Mapping[int, float]) -> tuple[int, int]:
        """Return the step of the best number, and the count of numbers after it."""
        step, value, since = 0, math.inf, 0
        for (at, number), following in zip(values.items(), [*values, math.inf][1:], strict=True):
            if self._sign * number < value - self._least:  # False for a NaN
                step, value, since = at, self._sign * number, 0
            else:
                since += 1
            over = since >= self._patience
            if over and any(at <= longer < following for longer in self.longer_from):
                since = 0
        return step, since
