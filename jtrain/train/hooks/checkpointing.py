"""Hooks that save checkpoints: at a cadence, at the best evaluation, and after a failed save."""

import time
from collections.abc import Callable
from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.train.hooks.evaluation import EvaluateEvery


class SaveEvery(Hook):
    """Hook that saves the state after steps `every`, 2 `every`, ...; the last of the hooks.

    It comes last because a resumed run does not repeat what other hooks did at the step of a
    checkpoint. An error of `save` ends the run, rather than train for hours without a checkpoint.

    Args:
        every: steps.
        save: takes a step and its state, and returns when the state may be donated. If it writes
            in the background, it raises the error of the last save at the next call.
        seconds: if above 0, the hook checks the clock after steps `every`, 2 `every`, ..., and
            saves once this much time has passed since the last save.
        clock: gives seconds.
    """

    settles = True  # the numbers of all steps up to a checkpoint are reported before it

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
        """Step of the last state that was given to `save`."""
        self._save = save

    def at(self, step: int, state: Any) -> None:
        """Save a state at the end of a run, unless it was the last to be saved."""
        if step != self.saved:
            self.again(step, state)

    def again(self, step: int, state: Any) -> None:
        """Save a state, even if it was the last to be saved."""
        self._save(step, state)
        self.saved, self._last = step, self._clock()

    def reads_state(self) -> bool:
        """Return whether a save is due."""
        return self.settles

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Save the state if it is due."""
        if self.settles:
            self.at(step, state)
        if self._seconds:  # by the clock the hook settles only at the call that will save
            self.settles = self._clock() - self._last >= self._seconds


class PrepareSaves(Hook):
    """Hook that loads what a save needs once a step is done: it would hold up the first step.

    Args:
        prepare: starts to load in the background.
    """

    def __init__(self, prepare: Callable[[], None]):
        self._prepare: Callable[[], None] | None = prepare

    def on_done(self, step: int) -> None:
        """Start to load, at the first call."""
        if self._prepare is not None:
            self._prepare()
            self._prepare = None


class SaveBest(Hook):
    """Hook that saves the state of each best evaluation so far; comes before `save`.

    Args:
        evaluation: comes before this hook.
        save: the run's hook.
    """

    settles = True

    def __init__(self, evaluation: EvaluateEvery, save: SaveEvery):
        self.every, self._evaluation, self._save = evaluation.every, evaluation, save

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Save the state if it is the best."""
        best = self._evaluation.best
        if best is not None and best.step == step:
            self._save.at(step, state)


class RetrySave(Hook):
    """Hook that checks after each step whether the last save has failed, and saves again.

    Args:
        owed: whether the last save failed; never waits, and raises after too many failures.
        save: the run's hook.
    """

    def __init__(self, owed: Callable[[], bool], save: SaveEvery):
        self._owed, self._save = owed, save

    def reads_state(self) -> bool:
        """Return whether the last save failed."""
        return self._owed()

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Save again if the last save failed."""
        if self._owed():
            self._save.again(step, state)
