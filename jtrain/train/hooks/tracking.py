"""Gives a run's numbers to trackers, which neither stop nor slow it."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jtrain.core.loop import Hook
from jtrain.train.hooks.background_tracker import BackgroundTracker, ReportedNumbers
from jtrain.train.trackers import TrackedRun, TrackerBackend


class Tracking(Hook):
    """A row for each step `every`, 2 `every`, ... and the last to each tracker, in its own thread.

    Args:
        trackers: values with `open`; see `jtrain.train.trackers`.
        about: the run.
        every: steps.
        tell: takes a line about what went wrong.
        resumed_at: as `Metrics` takes it.
        more: gives further numbers of a step: the learning rate, the speed.
        capacity: rows that may wait for a tracker.
        patience: seconds that the end of the run waits for what is left.
    """

    last = True

    def __init__(
        self,
        trackers: Sequence[TrackerBackend],
        about: TrackedRun,
        *,
        every: int = 1,
        tell: Callable[[str], None],
        resumed_at: int | None = None,
        more: Callable[[int], Mapping[str, float]] = lambda step: {},
        capacity: int = 1000,
        patience: float = 10.0,
    ):
        self.every, self._tell, self._more, self._patience = every, tell, more, patience
        self._news: collections.deque[str] = collections.deque()
        names: collections.Counter[str] = collections.Counter()
        self._beside: list[BackgroundTracker] = []
        for tracker in trackers:
            names[tracker.kind] += 1
            number = f"-{names[tracker.kind]}" if names[tracker.kind] > 1 else ""
            self._beside.append(
                BackgroundTracker(
                    tracker,
                    about,
                    note=about.directory / "trackers" / f"{tracker.kind}{number}.json",
                    resumes=resumed_at is not None,
                    capacity=capacity,
                    tell=self._news.append,
                )
            )

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hands the row on."""
        self.row(step, "", {**numbers, **self._more(step)})
        self._say()

    def row(self, step: int, set: str, numbers: Mapping[str, Any]) -> None:
        """Hands on what was measured on a set; arrays stay out."""
        plain = {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}
        for each in self._beside:
            each.put(ReportedNumbers(step, set, plain))

    def close(self, end: Literal["done", "stopped", "failed"] = "stopped") -> None:
        """Ends the trackers' runs, and says what they lost."""
        lost = [each.close(end, self._patience) for each in self._beside]
        self._beside = []
        self._say()
        for line in filter(None, lost):
            self._tell(line)

    def _say(self) -> None:
        while self._news:
            self._tell(self._news.popleft())
