"""A tracker in a thread of its own: whatever it does, the run goes on as if it were not there."""

import json
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.io.regular_files import read_json
from jtrain.train.trackers import TrackedRun, TrackerBackend


class ReportedNumbers(NamedTuple):
    """Numbers of a step, of a data set by name or of training by none."""

    step: int
    set: str
    numbers: Mapping[str, float]


class BackgroundTracker:
    """Hands rows to a tracker, in order, without ever waiting for it.

    What it wrote of each set is noted in a file beside the run, before it is written: so a run that
    was killed and takes steps again tracks none twice.

    Args:
        tracker: opened in the thread.
        about: the run; its `id` is looked up in the note.
        note: the file.
        resumes: whether the run goes on; if not, an old note is forgotten.
        capacity: rows that may wait; a tracker so slow that more do loses them.
        tell: takes a line about what went wrong, at most one here; it is called in the thread.
    """

    def __init__(
        self,
        tracker: TrackerBackend,
        about: TrackedRun,
        *,
        note: Path,
        resumes: bool,
        capacity: int = 1000,
        tell: Callable[[str], None],
    ):
        self.kind = str(tracker.kind)
        self._tracker, self._about = tracker, about
        self._note = _Note(note, resumes, about.run)
        self._capacity, self._tell = capacity, tell
        self._rows: queue.SimpleQueue[ReportedNumbers | None] = queue.SimpleQueue()
        self._taken = self._written = self._skipped = 0
        self._why, self._stop = "", threading.Event()
        self._end: Literal["done", "stopped", "failed"] = "stopped"
        self._thread = threading.Thread(target=self._work, name=self.kind, daemon=True)
        self._thread.start()

    def put(self, row: ReportedNumbers) -> None:
        """Leaves a row for the tracker; returns at once."""
        self._taken += 1
        if self._rows.qsize() >= self._capacity:
            self._why = self._why or f"it is slow, and more than {self._capacity} rows waited"
        elif self._thread.is_alive():
            self._rows.put(row)

    def close(self, end: Literal["done", "stopped", "failed"], seconds: float) -> str:
        """Waits so long for what is left; says what was lost, or nothing."""
        self._end = end
        self._rows.put(None)
        self._thread.join(seconds)
        late = self._thread.is_alive()
        self._stop.set()
        lost = self._taken - self._written - self._skipped
        if not lost and not (late or self._why):
            return ""
        why = self._why or f"it did not end within {seconds:g} s"
        return (
            f"tracker {self.kind}: {lost} of {self._taken} rows lost ({why}). "
            f"metrics.jsonl has all of them."
        )

    def _work(self) -> None:
        try:
            writer = self._tracker.open(self._about_noted())
            self._note.id = writer.id
        except BaseException as error:  # SystemExit too: it is one of theirs
            self._fails("could not be opened", error)
            return
        while (row := self._rows.get()) is not None and not self._stop.is_set():
            if not self._note.takes(row):
                self._skipped += 1
                continue
            named = {f"{row.set}/{n}" if row.set else n: x for n, x in row.numbers.items()}
            try:
                self._note.write(row)
                writer.write(row.step, named)
                self._written += 1
            except BaseException as error:
                self._fails(f"did not take step {row.step}", error)
        try:
            writer.close(self._end)
        except BaseException as error:
            self._fails("did not close", error)

    def _about_noted(self) -> TrackedRun:
        return TrackedRun(
            name=self._about.name,
            directory=self._about.directory,
            config=self._about.config,
            id=self._note.id,
            run=self._about.run,
        )

    def _fails(self, what: str, error: BaseException) -> None:
        first, self._why = not self._why, self._why or f"{type(error).__name__}: {error}"
        if first:
            self._tell(f"tracker {self.kind} {what}, training goes on: {self._why}")


class _Note:
    """What a tracker wrote already: the id of its run, and of each set the last step."""

    def __init__(self, path: Path, resumes: bool, run: str):
        self._path, self._run = path, run
        self.id, self._last = "", {}
        try:
            known: Any = read_json(path, inside=path.parent) if resumes else {}
            if known.get("run", run) != run:
                return  # the run was copied: this one has none in the service yet
            last = {str(name): int(step) for name, step in dict(known["last"]).items()}
            self.id, self._last = str(known["id"]), last
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # none, or none that can be read: a new run of the tracker

    def takes(self, row: ReportedNumbers) -> bool:
        """Whether the row is new."""
        return row.step > self._last.get(row.set, -1)

    def write(self, row: ReportedNumbers) -> None:
        """Notes a row."""
        self._last[row.set] = row.step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(
            self._path.name + ".new"
        )  # not flushed: a power cut doubles rows
        new.write_text(json.dumps({"run": self._run, "id": self.id, "last": self._last}))
        new.replace(self._path)
