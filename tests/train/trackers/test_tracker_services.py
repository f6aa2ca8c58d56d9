"""Each tracker's output is read back by the service's own reader; nothing leaves the machine.

Each wants the package of its extra (`pip install 'jtrain[tensorboard,wandb,mlflow]'`, and
`tensorboard` for reading event files).
"""

import importlib
import json
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jtrain.train.hooks.tracking import Tracking
from jtrain.train.trackers import MLflow, TensorBoard, TrackedRun, WandB

LOSSES = {step: 1.0 / step for step in range(1, 21)}


def quietly(module: str) -> Any:
    """Import a package without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module)


def killed_and_gone_on_with(tracker: Any, directory: Path) -> tuple[TrackedRun, list[str]]:
    """Track a run of 20 steps, killed at step 12 with a checkpoint of step 5; return the log."""
    about = TrackedRun(name="try", directory=directory, config={"optimizer.lr": 0.1, "name": "try"})
    told: list[str] = []
    for steps, resumed_at, end in ((range(1, 13), None, "stopped"), (range(6, 21), 5, "done")):
        tracking = Tracking([tracker], about, log=told.append, resumed_at=resumed_at, patience=60.0)
        for step in steps:
            tracking.on_numbers(step, {"loss": LOSSES[step]})
            if step % 10 == 0:
                tracking.row(step, "valid", {"loss": 2 * LOSSES[step]})
        tracking.close(end)
    return about, told


def read_tensorboard(directory: Path) -> Callable[[str], list[tuple[int, float]]]:
    quietly("tensorboard")
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(directory))
    events.Reload()
    return lambda tag: [(each.step, each.value) for each in events.Scalars(tag)]


def alike(found: list[tuple[int, float]], expected: dict[int, float]) -> None:
    assert [step for step, _ in found] == list(expected)
    for step, value in found:
        assert value == pytest.approx(expected[step], rel=1e-6)  # some keep float32


VALID = {10: 0.2, 20: 0.1}


@pytest.mark.filterwarnings("ignore")  # of the packages, about themselves
@pytest.mark.slow
def test_tensorboard_has_each_step_once(tmp_path: Path):
    quietly("tensorboardX")
    quietly("tensorboard")
    _, told = killed_and_gone_on_with(TensorBoard(), tmp_path)
    assert told == []
    read = read_tensorboard(tmp_path / "tensorboard")
    alike(read("loss"), LOSSES)
    alike(read("valid/loss"), VALID)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_tensorboard_forgets_the_run_that_was_begun_anew(tmp_path: Path):
    quietly("tensorboardX")
    quietly("tensorboard")
    for steps in (range(1, 13), range(1, 6)):
        about = TrackedRun(name="try", directory=tmp_path, config={})
        tracking = Tracking(
            [TensorBoard(directory=str(tmp_path / "all"))], about, log=print, patience=60.0
        )
        for step in steps:
            tracking.on_numbers(step, {"loss": LOSSES[step]})
        tracking.close("done")
    alike(read_tensorboard(tmp_path / "all" / "try")("loss"), {i: LOSSES[i] for i in range(1, 6)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_wandb_has_each_step_once(tmp_path: Path, monkeypatch):
    quietly("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _, told = killed_and_gone_on_with(WandB(mode="offline"), tmp_path)
    assert told == []
    found, ids = [], set()
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")):
        ids.add(file.stem)
        found += _history(file)
    assert len(ids) == 1, "both parts are of one run"
    alike([(s, row["loss"]) for s, row in found if "loss" in row], LOSSES)
    alike([(s, row["valid/loss"]) for s, row in found if "valid/loss" in row], VALID)


def _history(file: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the rows in a file of wandb's: LevelDB's log of its own protocol's records."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for data in _log_records(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            row = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items
            }
            rows.append((row["_step"], row))
    return rows


def _log_records(data: bytes) -> Iterator[bytes]:
    """Source: https://github.com/google/leveldb/blob/main/doc/log_format.md; 7 bytes of head."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_wandb_without_a_login_is_told_and_does_not_ask(tmp_path: Path, monkeypatch):
    quietly("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    _, told = killed_and_gone_on_with(WandB(), tmp_path)
    assert "nobody is logged in to wandb. Type: wandb login" in told[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_mlflow_has_each_step_once(tmp_path: Path, monkeypatch):
    quietly("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # put back afterwards
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    _, told = killed_and_gone_on_with(MLflow(uri=uri), tmp_path)
    assert told == []
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("jtrain")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "try"
    assert run.data.params == {"optimizer.lr": "0.1", "name": "try"}
    of = lambda name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
    alike(of("loss"), LOSSES)
    alike(of("valid/loss"), VALID)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_mlflow_takes_what_is_not_finite_and_names_that_it_does_not_know(
    tmp_path: Path, monkeypatch
):
    quietly("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    about = TrackedRun(name="try", directory=tmp_path, config={"a[0]": "x" * 9000})
    told: list[str] = []
    tracking = Tracking([MLflow(uri=uri)], about, log=told.append, patience=60.0)
    tracking.on_numbers(1, {"loss": math.nan, "top(5)": 0.5})
    tracking.close("failed")
    assert told == []
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("jtrain").experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.metrics["top_5_"] == 0.5
