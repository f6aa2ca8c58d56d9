"""Trackers, pictures and tables of a run, and their report."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from quick_study import CODE, at_home, config_of, trained, write_study

from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.train.trackers import TensorBoard

pytestmark = pytest.mark.thorough

SHOWS = (
    CODE.replace(
        "        return jt.Experiment(",
        """        def pictures(params, extra, key):
            return {"weights": jnp.clip(128 + 64 * params["up"], 0, 255)[None, :, :, None]}

        return jt.Experiment(
            pictures=pictures,""",
    )
    .replace(
        'return cross_entropy(x @ params["down"], batch["label"], batch["mask"])',
        """logits = x @ params["down"]
            loss = cross_entropy(logits, batch["label"], batch["mask"])
            loss, told = loss if isinstance(loss, tuple) else (loss, {})
            return loss, {**told, "confusion": confusion(logits, batch["label"], batch["mask"])}""",
    )
    .replace(
        "from jtrain.losses.cross_entropy",
        "from jtrain.losses.accuracy import confusion\nfrom jtrain.losses.cross_entropy",
    )
)


@pytest.fixture
def home(tmp_path: Path, tmp_path_factory, monkeypatch) -> Path:
    at_home(tmp_path, monkeypatch, tmp_path_factory.getbasetemp() / "compiled")
    return tmp_path


def test_a_report_has_the_pictures_and_tables_that_a_run_made(home: Path, capsys):
    path = write_study(home, code=SHOWS)
    outcome = trained(path, "log.pictures=6")
    for name in ("weights-6.png", "weights-12.png"):
        assert (outcome.directory.pictures / name).read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(outcome.directory.path)]) == 0
    text = (outcome.directory.path / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 2
    assert text.count('class="heat"') == 2  # training and validation
    assert "valid/confusion, step 12" in text
    assert capsys.readouterr().err == ""
    assert main(["eval", str(outcome.directory.path)]) == 0
    assert "confusion" not in capsys.readouterr().out
    assert main(["eval", str(outcome.directory.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["valid"]
    assert np.sum(found["confusion"]) == pytest.approx(1)
    assert np.trace(found["confusion"]) > 0.5


def test_a_failing_tracker_only_adds_a_line_to_the_log(home: Path, monkeypatch):
    path = write_study(home)
    plain = trained(path, "name=plain")

    def broken(self, about):
        time.sleep(0.05)
        raise ConnectionError("nobody there")

    monkeypatch.setattr(TensorBoard, "package", "json")  # which everyone has
    monkeypatch.setattr(TensorBoard, "open", broken)
    asked = trained(path, "name=asked", "trackers=[{kind: tensorboard}]")
    assert asked.status == "done"
    assert asked.directory.metrics.read_bytes() == plain.directory.metrics.read_bytes()
    log = asked.directory.log.read_text()
    assert (
        "tracker tensorboard could not be opened, and the run goes on without it: "
        "ConnectionError: nobody" in log
    )
    assert "tracker tensorboard: 14 of 14 rows lost (ConnectionError: nobody there)" in log


def test_a_tracker_without_its_package_is_refused_before_training(home: Path, monkeypatch):
    path = write_study(home)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Type: pip install 'jtrain\[tensorboard\]'"):
        trained(path, "trackers=[{kind: tensorboard}]")
    assert not (home / "runs").exists()


def test_trackers_are_a_list_of_choices_in_a_config(home: Path):
    path = write_study(home)
    config = config_of(path, ["trackers=[{kind: tensorboard, directory: logs}, {kind: mlflow}]"])
    assert config.trackers[0] == TensorBoard(directory="logs")
    assert [tracker.kind for tracker in config.trackers] == ["tensorboard", "mlflow"]
    with pytest.raises(ConfigError, match=r"trackers.*wandb"):
        config_of(path, ["trackers=[{kind: wandbb}]"])
    with path.open("a") as file:
        file.write("trackers:\n  - kind: wandb\n    mode: offline\n")
    assert config_of(path).trackers[0].mode == "offline"


def test_pictures_of_bytes_are_stored_exactly(home: Path):
    path = write_study(home, code=SHOWS)
    outcome = trained(path, "steps=1", "evaluate.every=0", "name=once")
    picture = (outcome.directory.pictures / "weights-1.png").read_bytes()
    wide, high = np.frombuffer(picture[16:24], ">u4")
    assert (wide, high) == (8, 2)
