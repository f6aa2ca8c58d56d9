"""A run directory knows the data and the tokenizer that the run was trained with."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from quick_study import CODE, at_home, config_of, trained, write_study

import jtrain as jt
from jtrain.errors import ConfigError, DataError
from jtrain.train.restore_run import evaluate_run
from jtrain.train.run_dir import RunDir

CONFIG = "configs/quick.yaml"
TOLD = "valid=InOrder(", "tokenizer=Path('tokenizer').read_text(), valid=InOrder("


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    assert CODE.count(TOLD[0]) == 1
    write_study(tmp_path, "from pathlib import Path\n" + CODE.replace(*TOLD))
    at_home(tmp_path, monkeypatch, compiled)


@pytest.mark.thorough
def test_a_run_is_resumed_and_used_with_its_own_tokenizer_only():
    tokenizer = Path("tokenizer")
    tokenizer.write_text("abc")
    outcome = trained(CONFIG, hooks=[lambda step, state: jt.Stop("a pause")])
    there = outcome.directory
    assert json.loads(there.status.read_text())["tokenizer"] == "abc"
    tokenizer.write_text("def")
    advice = r"by abc, .* by def.*jtrain run runs/quick/config.yaml name=quick-2"
    with pytest.raises(DataError, match=advice):
        trained(CONFIG)
    with pytest.raises(DataError, match=advice):
        evaluate_run(config_of(there.config), there.path)
    assert trained(CONFIG, "name=quick-2").status == "done", "as the advice says"
    tokenizer.write_text("abc")
    assert trained(CONFIG).status == "done"
    assert evaluate_run(config_of(there.config), there.path)[0] == 12


def test_data_without_a_tokenizer_is_refused_where_there_was_one(tmp_path: Path):
    there = RunDir(tmp_path)
    there.check_tokenizer("abc")
    there.write_status("running", tokenizer="abc")
    with pytest.raises(DataError, match="tokens by none"):
        there.check_tokenizer("")


def test_a_path_that_orbax_cannot_write_is_refused_before_training(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/h\xf6me"  # in Latin-1
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    loss = lambda p, batch, rng: jt.Mean.of((batch["x"] - p["w"]) ** 2, batch["mask"])
    with pytest.raises(ConfigError, match=r"xf6me.* is not UTF-8.*: rename the folder"):
        jt.fit(loss, {"w": 0.0}, {"x": np.ones(8)}, steps=2, name="mine", quiet=True)
    assert not os.listdir()


DATA = "train, valid = points(self.data.rows, 0)", "train, valid = points(*numbers())"
NUMBERS = """

def numbers():
    return [int(x) for x in Path("numbers").read_text().split()]
"""


@pytest.mark.thorough
def test_a_run_is_resumed_on_its_own_data_only(tmp_path: Path):
    assert CODE.count(DATA[0]) == 1
    code = CODE.replace(*DATA).replace("\n\ndef points", NUMBERS + "\n\ndef points")
    (tmp_path / "experiments" / "quick.py").write_text("from pathlib import Path\n" + code)
    Path("numbers").write_text("200 0")
    there = trained(CONFIG, hooks=[lambda step, state: jt.Stop("a pause")]).directory
    known = json.loads(there.status.read_text())["data"]
    assert known.startswith("200 rows ")
    about = json.loads((there.checkpoints / "1" / "about.json").read_text())["about"]
    assert about["data"] == known
    for other in ("200 1", "199 0"):
        Path("numbers").write_text(other)
        rows = other.split()[0]
        with pytest.raises(DataError, match=f"{known}\n.*is now\n  {rows} rows ") as error:
            trained(CONFIG)
        assert str(there.path) in str(error.value)
    words = str(error.value).partition("jtrain run ")[2].replace("CONFIG ... ", "").split()
    assert words == ["name=quick-2", f"init_from.path={there.path}"]
    assert trained(CONFIG, *words).status == "done", "as the advice says"
    Path("numbers").write_text("200 0")
    assert trained(CONFIG).status == "done"
    assert there.facts()["step"] == 12


def test_a_run_from_before_fingerprints_resumes(tmp_path: Path):
    there = RunDir(tmp_path)
    there.write_status("running", step=3)
    there.check_data("200 rows 0123", "name=x-2")
    there.write_status("running", data="200 rows 0123")
    there.check_data("", "name=x-2")
    with pytest.raises(DataError, match=r"name=x-2 init_from\.path="):
        there.check_data("200 rows 4567", "name=x-2")
