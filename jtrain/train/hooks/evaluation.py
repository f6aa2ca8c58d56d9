"""Measures the state of a run at a cadence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from jtrain.checkpoint.retention import BestMetric, best_of
from jtrain.config.suggestions import did_you_mean
from jtrain.core.loop import Hook, Stop, StoppedError
from jtrain.core.types import Metrics
from jtrain.errors import ConfigError

Results: TypeAlias = Mapping[int, Mapping[str, float]]  # of each measured step its numbers


@runtime_checkable
class EvaluationListener(Protocol):
    """What hears of evaluations; a hook may be one."""

    def on_results(self, step: int, name: str, results: Results) -> Stop | None:
        """Sees all results of the set `name` up to `step`, in order, and may end the run.

        What it says follows from them alone: so a run that is stopped and goes on ends where one
        that never stopped does.
        """
        ...


class EvaluationResult(NamedTuple):
    """What was measured after a step."""

    step: int
    numbers: Mapping[str, float]


class EvaluateEvery(Hook):
    """Measures the state after steps `every`, 2 `every`, ..., and keeps what was found.

    Args:
        every: steps.
        measure: a state -> its numbers; it does not keep the state.
        tell: takes the step and the numbers: `lambda step, numbers: metrics.row(step, "valid",
            numbers)`.
        name: of the set that it is measured on.
        best: `lowest loss`, `highest accuracy`, ...: which result is the best one.
        earlier: the results of the run that is resumed (`metrics.results(path, "valid")`).
        judges: hear of each result.
    """

    settles = True  # its row comes after those of the steps before it

    def __init__(
        self,
        *,
        every: int,
        measure: Callable[[Any], Mapping[str, float]],
        tell: Callable[[int, Mapping[str, float]], None],
        name: str = "valid",
        best: str = "lowest loss",
        earlier: Results | None = None,
        judges: Sequence[EvaluationListener] = (),
    ):
        self.every, self.name, self.judges = every, name, judges
        self._asked: Stop | None = None
        self.results: dict[int, Mapping[str, float]] = dict(sorted((earlier or {}).items()))
        """Of each step that was measured the numbers, in order."""
        self._measure, self._tell, self._goal = measure, tell, BestMetric.parse(best)

    @property
    def newest(self) -> EvaluationResult | None:
        """The last result, None before the first."""
        return EvaluationResult(*list(self.results.items())[-1]) if self.results else None

    @property
    def best(self) -> EvaluationResult | None:
        """The best result, the earliest of equals; None if no number could be compared."""
        if self._goal is None:
            return None
        found = {s: x[self._goal.name] for s, x in self.results.items() if self._goal.name in x}
        step = best_of(found, self._goal)
        return None if step is None else EvaluationResult(step, self.results[step])

    def number(self, step: int) -> float | None:
        """What the best is found by, of a step; None where there is none."""
        name = self._goal.name if self._goal else ""
        return self.results.get(step, {}).get(name)

    def latest(self, name: str = "loss") -> float | None:
        """A number of the newest result, None while there is none."""
        return self.newest.numbers.get(name) if self.newest else None

    def at(self, step: int, state: Any) -> Mapping[str, float]:
        """The numbers of a state, measured unless its step already was: for the ends of a run."""
        if step not in self.results:
            numbers = self._measure(state)
            self.results[step] = numbers
            self._tell(step, numbers)
            self._asked = self.verdict()
        return self.results[step]

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Measures it, and ends the run if a judge says so."""
        try:
            self.at(step, state)
        except StoppedError as asked:  # measured when the run goes on
            return asked.stop
        return self._asked

    def verdict(self) -> Stop | None:
        """What the judges say of the results so far; None before the first."""
        if self.newest is None:
            return None
        said = [
            judge.on_results(self.newest.step, self.name, self.results) for judge in self.judges
        ]
        return next((stop for stop in said if stop), None)


def hearing(evaluations: Mapping[str, EvaluateEvery], hooks: Sequence[Hook]) -> list[EvaluateEvery]:
    """The evaluations by set, heard by those of `hooks` that are judges.

    One hears of the set that it names in `of`; of the first if that is empty; without it, of all.

    Raises:
        ConfigError: if there is no such set.
    """
    first = next(iter(evaluations), "")
    for hook in hooks:
        if isinstance(hook, EvaluationListener):
            of = getattr(hook, "of", None)
            name = first if of == "" else of
            if name is not None and name not in evaluations:
                there = f"there are {', '.join(evaluations)}" if evaluations else "there is none"
                near = did_you_mean(name, evaluations) or "; give the data that it is measured on"
                raise ConfigError(
                    f"{type(hook).__name__} waits for evaluations{f' of {of}' if of else ''}, and "
                    f"{there}{near}: valid=..."
                )
            for each in evaluations.values() if name is None else [evaluations[name]]:
                each.judges = [*each.judges, hook]
    return list(evaluations.values())
