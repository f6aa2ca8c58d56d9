"""Trackers get each row once, whatever fails; a failing one costs a line in the log."""

import contextlib
import dataclasses
import importlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jtrain as jt
from jtrain.io.log import LOG
from jtrain.io.png import encode_png
from jtrain.train.hooks.tracking import Tracking
from jtrain.train.trackers import MLflow, TensorBoard, TrackedRun


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

    def show(self, step, shown):
        self.rows.append((step, dict(shown)))

    def attach(self, path):
        self.rows.append(path)

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


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the lines that are logged in the block, by any thread."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    LOG.addHandler(handler)
    yield lines
    LOG.removeHandler(handler)


def tracked(tracker, about, *, steps=range(1, 31), end="done", **options) -> list[str]:
    """Return the logged lines."""
    with logged() as lines:
        tracking = Tracking([tracker], about, **options)
        for step in steps:
            tracking.on_numbers(step, {"loss": 1.0 / step, "confusion": [[1.0]]})
            if step % 10 == 0:
                tracking.row(step, "valid", {"loss": 2.0 / step, "rows": 7})
        tracking.close(end)
    return lines


def test_each_row_comes_once_and_in_order_with_its_set(about: TrackedRun):
    fake = Fake()
    told = tracked(fake, about, more=lambda updates: {"learning_rate": 0.5**updates})
    assert told == []
    first = [(i, {"loss": 1.0 / i, "learning_rate": 0.5 ** (i - 1)}) for i in (1, 2)]
    assert fake.rows[:2] == first
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
        f"tracker fake: {lost} of 33 rows lost ({why}). The run's own files have all of them."
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


def test_pictures_and_texts_come_once(about: TrackedRun):
    fake = Fake()
    for resumed_at in (None, 2):
        tracking = Tracking([fake], about, resumed_at=resumed_at)
        for name, value in {"digits": Path("digits-3.png"), "sample": "to be"}.items():
            tracking.show(3, {name: value})
        tracking.close()
    assert fake.rows == [(3, {"digits": Path("digits-3.png")}), (3, {"sample": "to be"})]


@pytest.mark.parametrize("end", ["done", "failed"])
def test_the_report_comes_last_of_a_run_that_did_not_fail(end: str, about: TrackedRun):
    def fails():
        raise OSError("disk full")

    fake, other = Fake(), Fake()
    assert tracked(fake, about, end=end, report=lambda: Path("report.html")) == []
    assert (fake.rows[-1] == Path("report.html")) == (end == "done")
    told = tracked(other, about, end=end, report=fails)
    assert len(told) == (2 if end == "done" else 0)
    assert other.ended == [end]


@jt.configclass
class Lines(jt.trackers.TrackerConfig):
    def open(self, about: TrackedRun) -> jt.trackers.TrackerRun:
        lines = about.directory / "lines.txt"
        more = lambda *given: lines.open("a").write(f"{given}\n") and None
        return jt.trackers.TrackerRun("lines", more, more, attach=more)


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_fit_takes_a_tracker_by_its_import_string(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loss = lambda w, batch, rng: jt.Mean.of((batch["x"] - w) ** 2, batch["mask"])
    kind = f"{__name__}:Lines"
    x = np.arange(16.0, dtype=np.float32)
    jt.fit(loss, np.float32(0), x, steps=2, name="mine", trackers=[kind], every=1, quiet=True)
    *rows, report, end = (tmp_path / "runs/mine/lines.txt").read_text().splitlines()
    assert [row[:3] for row in rows] == ["(1,", "(2,"]
    assert "report.html" in report
    assert end == "('done',)"
    page = (tmp_path / "runs/mine/report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "done" in page


LOSSES = {step: 1.0 / step for step in range(1, 21)}


def quietly(module: str) -> Any:
    """Import a package without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module)


def killed_and_gone_on_with(tracker: Any, directory: Path) -> list[str]:
    """Track a run of 20 steps, killed at step 12 with a checkpoint of step 5; return the log."""
    about = TrackedRun(name="try", directory=directory, config={"optimizer.lr": 0.1, "name": "try"})
    report = directory / "report.html"
    report.write_text("a page")
    with logged() as told:
        for steps, resumed_at, end in ((range(1, 13), None, "stopped"), (range(6, 21), 5, "done")):
            how = {"resumed_at": resumed_at, "patience": 60.0, "report": lambda: report}
            tracking = Tracking([tracker], about, **how)
            for step in steps:
                tracking.on_numbers(step, {"loss": LOSSES[step]})
                if step % 10 == 0:
                    tracking.row(step, "valid", {"loss": 2 * LOSSES[step]})
            (directory / "a-20.png").write_bytes(encode_png([[0, 255]]))
            tracking.show(20, {"a": directory / "a-20.png", "sample": "to be"})
            tracking.close(end)
    return told


def read_tensorboard(directory: Path) -> Callable[[str], list[tuple[int, float]]]:
    quietly("tensorboard")
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert events.Images("a")[0].encoded_image_string == encode_png([[0, 255]])
    assert "sample/text_summary" in events.Tags()["tensors"]
    plugin = importlib.import_module("tensorboard.plugins.hparams.metadata")
    given = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin.parse_session_start_info_plugin_data(given).hparams
    assert hparams["optimizer.lr"].number_value == 0.1
    assert hparams["name"].string_value == "try"
    return lambda tag: [(each.step, each.value) for each in events.Scalars(tag)]


def read_mlflow(directory: Path) -> Callable[[str], list[tuple[int, float]]]:
    client = quietly("mlflow.tracking").MlflowClient((directory / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("jtrain").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "try")
    assert run.data.params == {"optimizer.lr": "0.1", "name": "try"}
    files = [
        x.path
        for folder in ("pictures", "texts")
        for x in client.list_artifacts(run.info.run_id, folder)
    ]
    assert files == ["pictures/a-20.png", "texts/sample-20.txt"]
    assert "report.html" in [x.path for x in client.list_artifacts(run.info.run_id)]
    history = lambda tag: client.get_metric_history(run.info.run_id, tag)
    return lambda tag: [(each.step, each.value) for each in history(tag)]


SERVICES = {
    "tensorboardX": (lambda path: TensorBoard(), read_tensorboard),
    "mlflow": (lambda path: MLflow(uri=(path / "mlruns").as_uri()), read_mlflow),
}


@pytest.mark.filterwarnings("ignore")  # of the packages, about themselves
@pytest.mark.slow
@pytest.mark.parametrize("package", SERVICES)
def test_a_service_has_each_step_once(package: str, tmp_path: Path, monkeypatch):
    quietly(package)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # put back afterwards
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    make, read = SERVICES[package]
    assert killed_and_gone_on_with(make(tmp_path), tmp_path) == []
    for tag, expected in (("loss", LOSSES), ("valid/loss", {10: 0.2, 20: 0.1})):
        found = dict(points := read(tmp_path)(tag))
        assert found == pytest.approx(expected, rel=1e-6)  # some keep float32
        assert len(points) == len(found), "each step once"
