"""Evaluation hooks: the state of a run is measured at a cadence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from jtrain.checkpoint.retention import BestMetric, best_step
from jtrain.core.loop import Hook, Stop, StoppedError
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean

Results: TypeAlias = Mapping[int, Mapping[str, float]]  # numbers by evaluated step


@runtime_checkable
class EvaluationListener(Protocol):
    """Receiver of evaluation results; a hook may be one."""

    def on_results(self, step: int, name: str, results: Results) -> Stop | None:
        """Take all results of the set `name` up to `step`, in order; a `Stop` ends the run.

        The return value must depend on the results only, so that a resumed run ends at the same
        step as one that never stopped.
        """
        ...


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
        listeners: get each result.
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
        listeners: Sequence[EvaluationListener] = (),
    ):
        self.every, self.name, self.listeners = every, name, listeners
        self._stop: Stop | None = None
        self.results: dict[int, Mapping[str, float]] = {} if results is None else results
        """Numbers by evaluated step, in order."""
        self._measure, self._log, self._goal = measure, log, BestMetric.parse(best)

    @property
    def newest(self) -> EvaluationResult | None:
        """Newest result; None before the first."""
        return EvaluationResult(*list(self.results.items())[-1]) if self.results else None

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

    def latest(self, name: str = "loss") -> float | None:
        """Return a number of the newest result; None before the first."""
        return latest_number(self.results, name)

    def at(self, step: int, state: Any) -> Mapping[str, float]:
        """Return the numbers of a state; it is measured unless its step already was."""
        if step not in self.results:
            numbers = self._measure(state)
            self.results[step] = numbers
            self._log(step, numbers)
            self._stop = self.verdict()
        return self.results[step]

    def on_state(self, step: int, state: Any) -> Stop | None:
        """Measure the state; end the run if a listener returns a `Stop`."""
        try:
            self.at(step, state)
        except StoppedError as error:  # the evaluation is made when the run resumes
            return error.stop
        return self._stop

    def verdict(self) -> Stop | None:
        """Return the first `Stop` of a listener for the results so far, or None."""
        if self.newest is None:
            return None
        step = self.newest.step
        stops = [each.on_results(step, self.name, self.results) for each in self.listeners]
        return next(filter(None, stops), None)


def latest_number(results: Results, name: str = "loss") -> float | None:
    """Return a number of the newest result; None before the first."""
    return results[max(results)].get(name) if results else None


def add_listeners(
    evaluations: Mapping[str, EvaluateEvery], hooks: Sequence[Hook]
) -> list[EvaluateEvery]:
    """Return the evaluations, after adding those of `hooks` that are listeners to them.

    A listener gets the results of the set named by its `of`, of the first set if `of` is empty, and
    of all sets if it has no `of`.

    Raises:
        ConfigError: if there is no such set.
    """
    first = next(iter(evaluations), "")
    for hook in hooks:
        if isinstance(hook, EvaluationListener):
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
                each.listeners = [*each.listeners, hook]
    return list(evaluations.values())
