"""Tracker in a background thread: a slow or failing service never blocks the run."""

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.io.regular_files import read_json
from jtrain.train.trackers import TrackedRun, TrackerBackend


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
