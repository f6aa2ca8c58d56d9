"""Evaluation hooks: a state is measured at a cadence, and a run may end early by the results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jtrain.checkpoint.retention import BestMetric, best_step, check_number
from jtrain.core.loop import Hook, Stop, StoppedError
from jtrain.errors import ConfigError, LossError
from jtrain.errors.spelling import did_you_mean
from jtrain.errors.user_code import api_boundary

Results: TypeAlias = Mapping[int, Mapping[str, float]]  # numbers by evaluated step


class EvaluationResult(NamedTuple):
    """Numbers of an evaluation after a step."""

    step: int
    numbers: Mapping[str, float]


class EvaluateEvery(Hook):
    """Hook that evaluates the state after steps `every`, 2 `every`, ..., and keeps the results.

    Args:
        every: steps.
        measure: `state -> numbers`; must not keep the state.
        log: takes the step and the numbers: `lambda step, numbers: metrics.row(step, "valid",
            numbers)`.
        name: of the evaluation set.
        best: `lowest loss`, `highest accuracy`, ...: which result is the best one.
        results: numbers by step so far, in order; new ones are added to it.
    """

    def __init__(
        self,
        *,
        every: int,
        measure: Callable[[Any], Mapping[str, float]],
        log: Callable[[int, Mapping[str, float]], None],
        name: str = "valid",
        best: str = "lowest loss",
        results: dict[int, Mapping[str, float]] | None = None,
    ):
        self.every, self.name = every, name
        self.listeners: list[Any] = []
        """Hooks with `on_results`, which get each result; see `add_listeners`."""
        self._stop: Stop | None = None
        self._heard: int | None = None  # step of the newest result that the listeners got
        self.results: dict[int, Mapping[str, float]] = {} if results is None else results
        """Numbers by evaluated step, in order."""
        self._measure, self._log, self._goal = measure, log, BestMetric.parse(best)

    @property
    def newest(self) -> EvaluationResult | None:
        """Newest result; None before the first."""
        return EvaluationResult(*list(self.results.items())[-1]) if self.results else None

    def newest_loss(self) -> float | None:
        """Return the loss of the newest result; None before the first."""
        return self.newest.numbers.get("loss") if self.newest else None

    @property
    def best(self) -> EvaluationResult | None:
        """Best result, the earliest of equals; None if no result has the metric."""
        if self._goal is None:
            return None
        values = {s: x[self._goal.name] for s, x in self.results.items() if self._goal.name in x}
        step = best_step(values, self._goal)
        return None if step is None else EvaluationResult(step, self.results[step])

    def number(self, step: int) -> float | None:
        """Return the number of a step that decides which is best; None if it has none."""
        name = self._goal.name if self._goal else ""
        return self.results.get(step, {}).get(name)

    def is_best(self, step: int) -> bool:
        """Return whether the best result is that of a step."""
        return self.best is not None and self.best.step == step

    def measure_once(self, step: int, state: Any) -> None:
        """Measure a state, unless its step already was; the listeners get the result."""
        if step not in self.results:
            numbers = self._measure(state)
            self.results[step] = numbers
            self._log(step, numbers)
            self.verdict()

    def on_state(self, step: int, state: Any) -> Stop | None:
        """Measure the state; end the run if a listener returns a `Stop`."""
        try:
            self.measure_once(step, state)
        except StoppedError as error:  # the evaluation is made when the run resumes
            return error.stop
        return self.verdict()

    def verdict(self) -> Stop | None:
        """Return the first `Stop` of a listener for the newest result, which it gets once."""
        if self.newest is not None and self.newest.step != self._heard:
            step = self._heard = self.newest.step
            stops = [each.on_results(step, self.name, self.results) for each in self.listeners]
            self._stop = next(filter(None, stops), None)
        return self._stop


def add_listeners(evaluations: Mapping[str, EvaluateEvery], hooks: Sequence[Hook]) -> None:
    """Add those of `hooks` that have `on_results` to the evaluations.

    `on_results(step, name, results)` takes all results of the set `name` up to `step`, in order; a
    `Stop` ends the run. It is called once for each result; a run that resumes or rolls back begins
    with the newest result before. It must depend on the results only, so that a resumed run ends at
    the same step as one that never stopped. A hook gets the results of the set named by its `of`,
    of the first set if `of` is empty, and of all sets if it has no `of`.

    Raises:
        ConfigError: if there is no such set.
    """
    first = next(iter(evaluations), "")
    for hook in hooks:
        if hasattr(hook, "on_results"):
            of = getattr(hook, "of", None)
            name = first if of == "" else of
            if name is not None and name not in evaluations:
                names = f"there are {', '.join(evaluations)}" if evaluations else "there is none"
                near = did_you_mean(name, evaluations) or "; give the data to evaluate on"
                raise ConfigError(
                    f"{type(hook).__name__} waits for evaluations{f' of {of}' if of else ''}, and "
                    f"{names}{near}: valid=..."
                )
            for each in evaluations.values() if name is None else [evaluations[name]]:
                each.listeners.append(hook)


class EarlyStop(Hook):
    """Hook that ends a run after `patience` evaluations in a row without improvement.

    The run is then done. The hook has no state of its own: it decides by all results so far, so a
    run that is stopped and resumed ends at the same step. To train a run longer that it ended, give
    more patience.

    Args:
        metric: `loss`, `lowest loss` or `highest accuracy`; `NAME/loss` for one of several sets.
            Without a set's name, the first set counts.
        patience: evaluations.
        least: an evaluation is better if it improves by more than this.
        after: the run does not end before this step.

    Raises:
        ConfigError: if patience is below 1 or no metric is named; for an argument of another
            library, with the name here.
        LossError: at the first evaluation, if it has no such metric.
    """

    @api_boundary
    def __init__(
        self, metric: str = "loss", patience: int = 5, *, least: float = 0.0, after: int = 0
    ):
        goal = BestMetric.parse(metric)
        if goal is None or patience < 1 or least < 0:
            raise ConfigError(
                f'EarlyStop("{metric}", patience={patience}, least={least}) waits for nothing: '
                f'name a metric, and a patience of 1 or more: EarlyStop("loss", patience=5).'
            )
        self.of, self.metric = goal.set_name, goal.metric
        """Evaluation set that the hook listens to (empty: the first), and its metric."""
        self._sign = 1 if goal.end == "lowest" else -1
        self._patience, self._least, self._after = patience, least, after

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
        for at, number in values.items():
            if self._sign * number < value - self._least:  # False for a NaN
                step, value, since = at, self._sign * number, 0
            else:
                since += 1
        return step, since
