"""Tracking hook: a run's numbers and pictures go to trackers, which neither stop nor slow it."""

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.io.log import LOG
from jtrain.io.regular_files import read_json
from jtrain.train.hooks.log import updates_before
from jtrain.train.trackers import End, Media, TrackedRun, TrackerConfig, TrackerRun

# Step, set (empty for training; the names of pictures and texts), and what sends it.
_Row = tuple[int, str, Callable[[TrackerRun], None]]


class Tracking(Hook):
    """Hook that sends steps `every`, 2 `every`, ... and the last to each tracker, in its thread.

    Args:
        trackers: values with `open`; see `jtrain.train.trackers`.
        resumed_at: step that the run resumes from; None for a new run.
        more: gives further numbers after a number of updates: the learning rate, the speed.
        capacity: rows that may wait for a tracker; further rows are lost.
        patience: seconds that the end of the run waits for the remaining rows.
        report: writes the report of the run and returns its path; None: there is none.
    """

    def __init__(
        self,
        trackers: Sequence[TrackerConfig],
        about: TrackedRun,
        *,
        every: int = 1,
        resumed_at: int | None = None,
        more: Callable[[int], Mapping[str, float]] = lambda updates: {},
        capacity: int = 1000,
        patience: float = 10.0,
        report: Callable[[], Path] | None = None,
    ):
        self.every, self._more, self._patience = every, more, patience
        self._threads: list[_TrackerThread] = []
        kinds = [tracker.kind for tracker in trackers]
        for i, tracker in enumerate(trackers):
            number = f"-{kinds[:i].count(tracker.kind) + 1}" if tracker.kind in kinds[:i] else ""
            file = about.directory / "trackers" / f"{tracker.kind}{number}.json"
            progress = _read_progress(file, about.run) if resumed_at is not None else {}
            thread = _TrackerThread(tracker, about, file, progress, capacity, report)
            self._threads.append(thread)

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self.row(step, "", {**numbers, **self._more(updates_before(step, numbers))})

    def row(self, step: int, set: str, numbers: Mapping[str, Any]) -> None:
        """Send the numbers of an evaluation set, without arrays."""
        named = {f"{set}/{name}" if set else name: x for name, x in numbers.items()}
        plain = {name: float(x) for name, x in named.items() if isinstance(x, int | float)}
        for thread in self._threads:
            thread.put((step, set, lambda run: run.write(step, plain)))

    def show(self, step: int, shown: Media) -> None:
        """Send pictures and texts of a step, by name; nothing where there are none."""
        send = lambda run: run.show(step, shown) if run.show else None
        for thread in self._threads if shown else ():
            thread.put((step, f"shown: {', '.join(shown)}", send))

    def close(self, end: End = "stopped") -> None:
        """End the trackers' runs, and log the rows that they lost."""
        for thread in self._threads:
            thread.close(end, self._patience)
        self._threads = []


class _TrackerThread:
    """Queue of rows for a tracker, in a thread: rows are sent in order, and `put` never waits.

    Before a row is sent, its step is written to a file in the run's directory. A run that was
    killed and repeats steps therefore tracks no step twice.

    Args:
        progress: id of the service's run, and the last step by set; empty for a new run.
        capacity: rows that may wait.
    """

    def __init__(
        self,
        tracker: TrackerConfig,
        about: TrackedRun,
        file: Path,
        progress: Mapping[str, Any],
        capacity: int,
        report: Callable[[], Path] | None,
    ):
        self._report = report
        self._tracker, self._file, self._capacity = tracker, file, capacity
        self._about = dataclasses.replace(about, id=progress.get("id", ""))
        self._last: dict[str, int] = dict(progress.get("last", {}))
        self._rows: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._received = self._done = 0
        self._error = ""
        self._end: End = "stopped"
        self._thread = threading.Thread(target=self._work, name=tracker.kind, daemon=True)
        self._thread.start()

    def put(self, row: _Row) -> None:
        self._received += 1
        if self._rows.qsize() < self._capacity:
            self._rows.put(row)
        elif not self._error:
            self._error = f"it is slow, and more than {self._capacity} rows waited"

    def close(self, end: End, seconds: float) -> None:
        """Wait up to `seconds` for the queued rows, and log how many are lost."""
        self._end = end
        self._rows.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._error = self._error or f"it did not end within {seconds:g} s"
        if self._error:
            LOG.warning(
                f"tracker {self._tracker.kind}: {self._received - self._done} of {self._received} "
                f"rows lost ({self._error}). The run's own files have all of them."
            )

    def _work(self) -> None:
        try:
            run = self._tracker.open(self._about)
        except BaseException as error:  # also SystemExit, which a tracker's package may raise
            self._fail("could not be opened", error)
            return
        while (row := self._rows.get()) is not None:
            step, set, send = row
            try:
                if step > self._last.get(set, -1):
                    self._write_progress(run.id, set, step)
                    send(run)
                self._done += 1
            except BaseException as error:
                self._fail(f"did not take step {step}", error)
        try:
            if run.attach and self._report and self._end != "failed":
                run.attach(self._report())
        except BaseException as error:
            self._fail("did not take the report", error)
        try:
            run.close(self._end)
        except BaseException as error:
            self._fail("did not close", error)

    def _fail(self, what: str, error: BaseException) -> None:
        if not self._error:
            self._error = f"{type(error).__name__}: {error}"
            kind = self._tracker.kind
            LOG.warning(f"tracker {kind} {what}, and the run goes on without it: {self._error}")

    def _write_progress(self, id: str, set: str, step: int) -> None:
        self._last[set] = step
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Not flushed: after a power cut some rows are sent twice.
        new = self._file.with_name(self._file.name + ".new")
        new.write_text(json.dumps({"run": self._about.run, "id": id, "last": self._last}))
        new.replace(self._file)


def _read_progress(file: Path, run: str) -> Mapping[str, Any]:
    """Return the progress of a tracker; empty for another run, of which this one is a copy."""
    try:
        found: Any = read_json(file, inside=file.parent)
        return found if found["run"] == run else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # the tracker starts a new run
