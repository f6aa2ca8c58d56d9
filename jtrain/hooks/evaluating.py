"""Measures the state of a run at a cadence."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jtrain.checkpoint.keeping import Goal, best_of
from jtrain.loop import Hook
from jtrain.types import Metrics


class Result(NamedTuple):
    """What was measured after a step."""

    step: int
    numbers: Mapping[str, float]


class Evaluate(Hook):
    """Measures the state after steps `every`, 2 `every`, ..., and keeps what was found.

    Args:
        every: steps.
        measure: a state -> its numbers; it does not keep the state.
        tell: takes the step and the numbers: `lambda step, numbers: metrics.row(step, "valid",
            numbers)`.
        best: `lowest loss`, `highest accuracy`, ...: which result is the best one.
        earlier: the results of the run that is resumed (`metrics.results(path, "valid")`).
    """

    settles = True  # its row comes after those of the steps before it

    def __init__(
        self,
        *,
        every: int,
        measure: Callable[[Any], Mapping[str, float]],
        tell: Callable[[int, Mapping[str, float]], None],
        best: str = "lowest loss",
        earlier: Mapping[int, Mapping[str, float]] | None = None,
    ):
        self.every = every
        self.results: dict[int, Mapping[str, float]] = dict(sorted((earlier or {}).items()))
        """Of each step that was measured the numbers, in order."""
        self._measure, self._tell, self._goal = measure, tell, Goal.parse(best)

    @property
    def newest(self) -> Result | None:
        """The last result, None before the first."""
        return Result(*list(self.results.items())[-1]) if self.results else None

    @property
    def best(self) -> Result | None:
        """The best result, the earliest of equals; None if no number could be compared."""
        if self._goal is None:
            return None
        found = {s: x[self._goal.name] for s, x in self.results.items() if self._goal.name in x}
        step = best_of(found, self._goal)
        return None if step is None else Result(step, self.results[step])

    def latest(self, name: str = "loss") -> float | None:
        """A number of the newest result, None while there is none."""
        return self.newest.numbers.get(name) if self.newest else None

    def at(self, step: int, state: Any) -> Mapping[str, float]:
        """The numbers of a state, measured unless its step already was: for the ends of a run."""
        if step not in self.results:
            numbers = self._measure(state)
            self.results[step] = numbers
            self._tell(step, numbers)
        return self.results[step]

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Measures it."""
        self.at(step, state)
