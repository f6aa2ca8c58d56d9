"""Saves the state of a run at a cadence."""

import time
from collections.abc import Callable
from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.train.hooks.evaluation import EvaluateEvery


class SaveEvery(Hook):
    """Saves the state after steps `every`, 2 `every`, ...; stands last among the hooks.

    Last, because a resumed run does not repeat what other hooks did at the step of a checkpoint: by
    then they must have done it. What `save` raises ends the run: better than hours of
    training that nothing keeps.

    Args:
        every: steps.
        save: takes a step and its state, and returns when the state may be donated. Where it
            writes beside training, it raises at the next call what went wrong in the last.
        seconds: above 0 it looks at the clock after steps `every`, 2 `every`, ..., and saves when
            so many have gone by since it last did.
        clock: gives seconds.
    """

    settles = True  # what it keeps, the numbers of all steps up to it have been told

    def __init__(
        self,
        *,
        every: int,
        save: Callable[[int, Any], None],
        seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.every, self.settles = every, seconds == 0
        self._seconds, self._clock, self._last = seconds, clock, clock()
        self.saved: int | None = None
        """The step of the last state that was given to `save`."""
        self._save = save

    def at(self, step: int, state: Any) -> None:
        """Saves a state unless it is the one that was saved last: for the end of a run."""
        if step != self.saved:
            self.again(step, state)

    def again(self, step: int, state: Any) -> None:
        """Saves a state, also if it is the one that was saved last."""
        self._save(step, state)
        self.saved, self._last = step, self._clock()

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Saves it."""
        if self.settles:
            self.at(step, state)
        if self._seconds:  # by the clock it settles only where it is going to save: at the next
            self.settles = self._clock() - self._last >= self._seconds


class SaveBest(Hook):
    """Saves the state of each evaluation that is better than all before it; stands before `save`.

    Args:
        evaluation: stands before this hook.
        save: of the run.
    """

    settles = True

    def __init__(self, evaluation: EvaluateEvery, save: SaveEvery):
        self.every, self._evaluation, self._save = evaluation.every, evaluation, save

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Saves it if it is the best."""
        best = self._evaluation.best
        if best is not None and best.step == step:
            self._save.at(step, state)


class RetrySave(Hook):
    """Asks after each step whether the last save has failed, and saves in its place.

    Args:
        owed: whether it has; never waits, and raises where it is enough.
        save: of the run.
    """

    def __init__(self, owed: Callable[[], bool], save: SaveEvery):
        self._owed, self._save = owed, save

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Saves within a step."""
        if self._owed():
            self._save.again(step, state)
