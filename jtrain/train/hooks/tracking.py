"""Tracking hook: a run's numbers are sent to trackers, which neither stop nor slow it."""

import collections
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jtrain.config.dump import flatten, to_plain
from jtrain.core.loop import Hook
from jtrain.train.evaluation_rows import NAME as EVALUATIONS
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.background_tracker import BackgroundTracker, ReportedNumbers
from jtrain.train.hooks.log import updates_before
from jtrain.train.hooks.speed import Speed
from jtrain.train.trackers import TrackedRun, TrackerBackend


class Tracking(Hook):
    """Hook that sends steps `every`, 2 `every`, ... and the last to each tracker, in its thread.

    Args:
        trackers: values with `open`; see `jtrain.train.trackers`.
        about: the run.
        every: steps.
        log: takes a line about an error.
        resumed_at: as `Metrics` takes it.
        more: gives further numbers after a number of updates: the learning rate, the speed.
        capacity: rows that may wait for a tracker.
        patience: seconds that the end of the run waits for the remaining rows.
        file: name of the file that has all rows.
    """

    last = True

    def __init__(
        self,
        trackers: Sequence[TrackerBackend],
        about: TrackedRun,
        *,
        every: int = 1,
        log: Callable[[str], None],
        resumed_at: int | None = None,
        more: Callable[[int], Mapping[str, float]] = lambda updates: {},
        capacity: int = 1000,
        patience: float = 10.0,
        file: str = "metrics.jsonl",
    ):
        self.every, self._log, self._more, self._patience = every, log, more, patience
        self._errors: collections.deque[str] = collections.deque()
        names: collections.Counter[str] = collections.Counter()
        self._trackers: list[BackgroundTracker] = []
        for tracker in trackers:
            names[tracker.kind] += 1
            number = f"-{names[tracker.kind]}" if names[tracker.kind] > 1 else ""
            self._trackers.append(
                BackgroundTracker(
                    tracker,
                    about,
                    note=about.directory / "trackers" / f"{tracker.kind}{number}.json",
                    resumes=resumed_at is not None,
                    capacity=capacity,
                    log=self._errors.append,
                    file=file,
                )
            )

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self.row(step, "", {**numbers, **self._more(updates_before(step, numbers))})
        self._log_errors()

    def row(self, step: int, set: str, numbers: Mapping[str, Any]) -> None:
        """Send the numbers of an evaluation set, without arrays."""
        plain = {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}
        for tracker in self._trackers:
            tracker.put(ReportedNumbers(step, set, plain))

    def close(self, end: Literal["done", "stopped", "failed"] = "stopped") -> None:
        """End the trackers' runs, and log the rows that they lost."""
        lost = [tracker.close(end, self._patience) for tracker in self._trackers]
        self._trackers = []
        self._log_errors()
        for line in filter(None, lost):
            self._log(line)

    def _log_errors(self) -> None:
        while self._errors:
            self._log(self._errors.popleft())


def build_tracking(
    config: RunConfig,
    path: Path,
    speed: Speed,
    *,
    run: str,
    log: Callable[[str], None],
    resumed_at: int | None,
) -> Tracking:
    """Return the hook that sends metrics, learning rate and speed to the trackers of `config`.

    Args:
        path: the run's directory.
        run: the run's id.
    """
    learning_rate = config.optimizer.learning_rate(config.steps)

    def more(updates: int) -> dict[str, float]:
        pace, rate = speed.pace, f"{speed.unit}_per_second"
        numbers = {"learning_rate": float(learning_rate(updates))}
        if pace is None:
            return numbers
        numbers |= {rate: getattr(pace, rate), "waiting": pace.waiting}
        return numbers | ({} if pace.mfu is None else {"mfu": pace.mfu})

    return Tracking(
        config.trackers,
        TrackedRun(config.name, path, flatten(to_plain(config)), run=run),
        every=min(config.log.every, config.steps),
        log=log,
        resumed_at=resumed_at,
        more=more,
    )


def track_evaluations(
    config: RunConfig, path: Path, *, run: str, log: Callable[[str], None]
) -> Tracking:
    """Return what sends the evaluations beside a run to the trackers of `config`.

    They are a run of their own in each service, `NAME-evaluation`: a service takes the rows of a
    run from one process, in the order of the steps.

    Args:
        path: the run's directory; the trackers' files go to its folder `evaluation`.
        run: the run's id.
    """
    plain = flatten(to_plain(config))
    about = TrackedRun(f"{config.name}-evaluation", path / "evaluation", plain, run=run)
    return Tracking(config.trackers, about, resumed_at=0, log=log, file=EVALUATIONS)
