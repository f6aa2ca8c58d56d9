"""Tracking hook: a run's numbers are sent to trackers, which neither stop nor slow it."""

import collections
import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.config.dump import flatten, to_plain
from jtrain.core.loop import Hook
from jtrain.io.regular_files import read_json
from jtrain.train.evaluation import NAME as EVALUATIONS
from jtrain.train.experiment import RunConfig
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


class ReportedNumbers(NamedTuple):
    """Numbers of a step; `set` names the data set and is empty for training."""

    step: int
    set: str
    numbers: Mapping[str, float]


class BackgroundTracker:
    """Queue of rows for a tracker: rows are sent in order, and `put` never waits.

    Before a row is sent, its step is written to a progress file in the run's directory. A run that
    was killed and repeats steps therefore tracks no step twice.

    Args:
        tracker: opened in the thread.
        about: the run; its `id` is read from the progress file.
        note: path of the progress file.
        resumes: whether the run resumes; if not, an old progress file is ignored.
        capacity: rows that may wait; further rows are lost.
        log: takes a line about the first error; called in the thread.
        file: name of the file that has all rows.
    """

    def __init__(
        self,
        tracker: TrackerBackend,
        about: TrackedRun,
        *,
        note: Path,
        resumes: bool,
        capacity: int = 1000,
        log: Callable[[str], None],
        file: str = "metrics.jsonl",
    ):
        self.kind = str(tracker.kind)
        self._tracker, self._about = tracker, about
        self._progress = _Progress(note, resumes, about.run)
        self._capacity, self._log, self._file = capacity, log, file
        self._rows: queue.SimpleQueue[ReportedNumbers | None] = queue.SimpleQueue()
        self._received = self._written = self._skipped = 0
        self._error, self._stop = "", threading.Event()
        self._end: Literal["done", "stopped", "failed"] = "stopped"
        self._thread = threading.Thread(target=self._work, name=self.kind, daemon=True)
        self._thread.start()

    def put(self, row: ReportedNumbers) -> None:
        """Queue a row for the tracker; returns at once."""
        self._received += 1
        if self._rows.qsize() >= self._capacity:
            self._error = self._error or f"it is slow, and more than {self._capacity} rows waited"
        elif self._thread.is_alive():
            self._rows.put(row)

    def close(self, end: Literal["done", "stopped", "failed"], seconds: float) -> str:
        """Wait up to `seconds` for the queued rows; return a line about lost rows, or ""."""
        self._end = end
        self._rows.put(None)
        self._thread.join(seconds)
        late = self._thread.is_alive()
        self._stop.set()
        lost = self._received - self._written - self._skipped
        if not lost and not (late or self._error):
            return ""
        why = self._error or f"it did not end within {seconds:g} s"
        return (
            f"tracker {self.kind}: {lost} of {self._received} rows lost ({why}). "
            f"{self._file} has all of them."
        )

    def _work(self) -> None:
        try:
            writer = self._tracker.open(dataclasses.replace(self._about, id=self._progress.id))
            self._progress.id = writer.id
        except BaseException as error:  # also SystemExit, which a tracker's package may raise
            self._fail("could not be opened", error)
            return
        while (row := self._rows.get()) is not None and not self._stop.is_set():
            if not self._progress.is_new(row):
                self._skipped += 1
                continue
            named = {f"{row.set}/{n}" if row.set else n: x for n, x in row.numbers.items()}
            try:
                self._progress.write(row)
                writer.write(row.step, named)
                self._written += 1
            except BaseException as error:
                self._fail(f"did not take step {row.step}", error)
        try:
            writer.close(self._end)
        except BaseException as error:
            self._fail("did not close", error)

    def _fail(self, what: str, error: BaseException) -> None:
        if not self._error:
            self._error = f"{type(error).__name__}: {error}"
            self._log(f"tracker {self.kind} {what}, and the run goes on without it: {self._error}")


class _Progress:
    """Progress of a tracker, in a file: the id of the service's run and the last step by set."""

    def __init__(self, path: Path, resumes: bool, run: str):
        self._path, self._run = path, run
        self.id, self._last = "", {}
        try:
            stored: Any = read_json(path, inside=path.parent) if resumes else {}
            if stored["run"] != run:
                return  # the run is a copy, and the service has no run of it yet
            last = {str(name): int(step) for name, step in dict(stored["last"]).items()}
            self.id, self._last = str(stored["id"]), last
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # no readable file: the tracker starts a new run

    def is_new(self, row: ReportedNumbers) -> bool:
        """Return whether the row comes after all rows that were sent."""
        return row.step > self._last.get(row.set, -1)

    def write(self, row: ReportedNumbers) -> None:
        """Write the step of a row to the file."""
        self._last[row.set] = row.step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not flushed: after a power cut some rows are sent twice.
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps({"run": self._run, "id": self.id, "last": self._last}))
        new.replace(self._path)
