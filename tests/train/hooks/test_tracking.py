"""A tracker that fails, sleeps or is missing costs a run nothing but a line in its log."""

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from jtrain.errors import ConfigError
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.trackers import TrackedRun, check_installed


@dataclasses.dataclass
class Fake:
    """Keeps what it is given; waits and raises as it is told."""

    kind: str = "fake"
    opens: threading.Event | Exception | None = None
    writes: threading.Event | Exception | None = None
    fails_at: int = -1
    closes: threading.Event | Exception | None = None
    rows: list = dataclasses.field(default_factory=list)
    opened: list = dataclasses.field(default_factory=list)
    ended: list = dataclasses.field(default_factory=list)
    id: str = "run-1"

    def open(self, about: TrackedRun) -> "Fake":
        do(self.opens)
        self.opened.append(about)
        return self

    def write(self, step, numbers):
        assert threading.current_thread().name == self.kind
        if self.fails_at in (-1, step):
            do(self.writes)
        self.rows.append((step, dict(numbers)))

    def close(self, end):
        do(self.closes)
        self.ended.append(end)


def do(what: threading.Event | Exception | None) -> None:
    if isinstance(what, Exception):
        raise what
    if what is not None:
        what.wait(60)


@pytest.fixture
def about(tmp_path: Path) -> TrackedRun:
    return TrackedRun(name="try", directory=tmp_path, config={"steps": 30})


def tracked(tracker, about, *, steps=range(1, 31), end="done", **options) -> list[str]:
    """Return the logged lines."""
    told: list[str] = []
    tracking = Tracking([tracker], about, log=told.append, **options)
    for step in steps:
        tracking.on_numbers(step, {"loss": 1.0 / step, "confusion": [[1.0]]})
        if step % 10 == 0:
            tracking.row(step, "valid", {"loss": 2.0 / step, "rows": 7})
    tracking.close(end)
    return told


def test_each_row_comes_once_and_in_order_with_its_set(about: TrackedRun):
    fake = Fake()
    told = tracked(fake, about, more=lambda updates: {"learning_rate": 0.5**updates})
    assert told == []
    assert fake.rows[:2] == [
        (i, {"loss": 1.0 / i, "learning_rate": 0.5 ** (i - 1)}) for i in (1, 2)
    ]
    assert fake.rows[10] == (10, {"valid/loss": 0.2, "valid/rows": 7.0})
    assert [step for step, _ in fake.rows] == sorted([*range(1, 31), 10, 20, 30])
    assert fake.ended == ["done"]
    assert fake.opened == [about]


@pytest.mark.parametrize(
    ("fake", "lost", "why"),
    [
        (Fake(opens=RuntimeError("no such project")), 33, "RuntimeError: no such project"),
        (Fake(writes=OSError("disk full")), 33, "OSError: disk full"),
        (Fake(writes=OSError("once"), fails_at=5), 1, "OSError: once"),
        (Fake(closes=ValueError("not sent")), 0, "ValueError: not sent"),
    ],
    ids=["open", "write", "one row", "close"],
)
def test_what_fails_is_told_and_what_was_lost_is_counted(fake: Fake, lost, why, about: TrackedRun):
    told = tracked(fake, about)
    assert len(told) == 2
    assert told[0].startswith("tracker fake ")
    assert "the run goes on without it" in told[0]
    assert told[1] == (
        f"tracker fake: {lost} of 33 rows lost ({why}). metrics.jsonl has all of them."
    )


@pytest.mark.parametrize("where", ["opens", "writes"])
def test_one_that_waits_holds_up_neither_a_step_nor_the_end(where: str, about: TrackedRun):
    waits = threading.Event()
    fake = Fake(**{where: waits})
    told = tracked(fake, about, capacity=10, patience=0.1)
    assert fake.rows == [], "it waits while all steps are taken and the run ends"
    waits.set()
    assert len(told) == 1
    assert "of 33 rows lost (it is slow, and more than 10 rows waited)" in told[0]


def test_one_that_does_not_end_is_left_behind(about: TrackedRun):
    told: list[str] = []
    fake = Fake(closes=threading.Event())
    tracking = Tracking([fake], about, log=told.append, patience=0.5)
    tracking.on_numbers(1, {"loss": 1.0})
    (tracker,) = tracking._trackers
    until = time.monotonic() + 300
    while not tracker._written and time.monotonic() < until:
        time.sleep(0.002)
    tracking.close("done")
    assert fake.closes is not None
    fake.closes.set()
    assert told == [
        "tracker fake: 0 of 1 rows lost (it did not end within 0.5 s). "
        "metrics.jsonl has all of them."
    ]


def test_a_copy_of_a_run_is_tracked_as_a_run_of_its_own(about: TrackedRun):
    first, copy = (dataclasses.replace(about, run=run) for run in ("first", "copy"))
    tracked(Fake(), first, steps=range(1, 21))
    same, other = Fake(), Fake()
    tracked(same, first, steps=range(11, 31), resumed_at=10)
    assert same.opened == [dataclasses.replace(first, id="run-1")]
    tracked(other, copy, steps=range(11, 31), resumed_at=10)
    assert other.opened == [copy], "no id of a run to go on with"
    assert len(other.rows) == 22, "none is taken for one that it has"


def test_a_run_that_goes_on_adds_to_the_same_one_and_doubles_no_step(about: TrackedRun):
    first, second = Fake(id="run-7"), Fake(id="other")
    tracked(first, about, steps=range(1, 13), end="stopped")
    tracked(second, about, steps=range(6, 31), resumed_at=5)  # killed at 12, saved at 5
    assert [about.id for about in (*first.opened, *second.opened)] == ["", "run-7"]
    steps = [step for step, row in first.rows + second.rows if "loss" in row]
    assert steps == list(range(1, 31))
    valid = [step for step, row in first.rows + second.rows if "valid/loss" in row]
    assert valid == [10, 20, 30]


def test_a_run_that_begins_anew_tracks_all_of_it_in_a_new_one(about: TrackedRun):
    tracked(Fake(), about, steps=range(1, 13), end="stopped")
    anew = Fake()
    tracked(anew, about, steps=range(1, 31))
    assert anew.opened[0].id == ""
    assert len(anew.rows) == 33


@pytest.mark.parametrize(
    "note",
    [
        *("", "{", "[1]", "null", "[" * 10**5),
        *('{"id": 3}', '{"id": "x", "last": 5}', '{"id": 1, "last": {"": "x"}}'),
    ],
)
def test_a_note_that_cannot_be_read_is_none(note: str, about: TrackedRun):
    (about.directory / "trackers").mkdir()
    (about.directory / "trackers" / "fake.json").write_text(note)
    fake = Fake()
    told = tracked(fake, about, resumed_at=0)
    assert (told, fake.opened) == ([], [about])
    assert len(fake.rows) == 33


def test_two_of_a_kind_have_notes_of_their_own(about: TrackedRun):
    fakes = [Fake(id="a"), Fake(id="b")]
    tracking = Tracking(fakes, about, log=print)
    tracking.on_numbers(1, {"loss": 1.0})
    tracking.close("done")
    assert [fake.rows for fake in fakes] == [[(1, {"loss": 1.0})]] * 2
    assert len(list((about.directory / "trackers").glob("*.json"))) == 2


def test_a_package_that_is_missing_is_reported_with_what_to_type():
    class Missing(Fake):
        package = "a_package_that_nobody_has"

    check_installed([Fake()])
    with pytest.raises(ConfigError, match=r"pip install 'jtrain\[fake\]', or run without it"):
        check_installed([Missing()])
