"""`jtrain ckpt`: list, verify, show, compare, remove and export checkpoints."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.checkpoint import CheckpointManager, lock
from jtrain.checkpoint.init_from import TensorFile
from jtrain.cli import main

RUN = "runs/a/checkpoints"


def state(step: int) -> dict:
    return {
        "params": {"block": {"kernel": jnp.arange(12.0).reshape(3, 4) + step}, "bias": jnp.ones(4)},
        "opt_state": {"mu": jnp.arange(4, dtype=jnp.int32) * step},
        "rng": jax.random.key(3),
    }


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kept")
    config = {"checkpoint": {"best": "lowest loss"}}
    with CheckpointManager(place / RUN, keep=0, best="lowest loss") as checkpoints:
        for step, loss in ((10, 0.5), (20, 0.25), (30, 0.75)):
            checkpoints.save(step, state(step), {"config": config}, loss)
    return place


@pytest.fixture(autouse=True)
def _home(saved_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(saved_runs, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")


def output(capfd, *words: str, code: int = 0) -> str:
    assert main(["ckpt", *words]) == code
    said = capfd.readouterr()
    return said.out if code in (0, 70) else said.err


def found(capfd, *words: str, code: int = 0) -> dict:
    return json.loads(output(capfd, *words, "--json", code=code))


def damage(step: int) -> None:
    path = next(path for path in Path(RUN, str(step)).rglob("d/*") if path.is_file())
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.thorough
def test_lists_each_step_with_its_marks(capfd):
    damage(30)
    Path(RUN, "10", "about.json").unlink()
    Path(RUN, "10").rename(Path(RUN, "10.damaged"))
    Path(RUN, "5.saving").mkdir()
    said = found(capfd, "ls", "a")
    assert [(row["step"], row["marks"], row["faults"]) for row in said["steps"]] == [
        (20, ["best"], []),
        (30, ["newest"], []),  # only verify reads its bytes
    ]
    assert said["damaged"] == ["10.damaged"]
    lines = output(capfd, "ls", "a").splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("loss 0.25  best")
    assert "set aside" in lines[3]


def test_verify_reads_every_byte_and_ends_with_70_where_one_is_wrong(capfd):
    assert [one["faults"] for one in found(capfd, "verify", "a")["steps"]] == [[], [], []]
    damage(20)
    said = found(capfd, "verify", "a", code=70)["steps"]
    assert [bool(one["faults"]) for one in said] == [False, True, False]
    text = output(capfd, "verify", "a", code=70)
    assert "20  DAMAGED" in text
    assert "its digest is" in text
    assert output(capfd, "verify", f"{RUN}/30").startswith("30  valid")
    assert output(capfd, "verify", "a", "--step", "10").startswith("10  valid")


def test_show_describes_a_checkpoint(capfd):
    said = found(capfd, "show", "a", "--step", "best")
    assert said["step"] == 20
    assert said["about"]["config"] == {"checkpoint": {"best": "lowest loss"}}
    kernel = said["leaves"]["params/block/kernel"]
    assert (kernel["is"], kernel["bytes"], len(kernel["fingerprint"])) == ("float32[3, 4]", 48, 16)
    assert "params/block/kernel  float32[3, 4]  48 B" in output(capfd, "show", "a")


def test_diff_names_the_leaves_that_differ_and_by_how_much(capfd):
    rows = found(capfd, "diff", f"{RUN}/10", f"{RUN}/30")["leaves"]
    assert [(row["leaf"], row["distance"]) for row in rows] == [
        ("opt_state/mu", 60.0),
        ("params/block/kernel", 20.0),
    ]
    assert "hold the same state" in output(capfd, "diff", "a", f"{RUN}/30")
    with CheckpointManager(Path("runs/b/checkpoints")) as checkpoints:
        checkpoints.save(30, {**state(30), "opt_state": {"nu": jnp.zeros(4)}}, {})
    rows = found(capfd, "diff", "a", "b")["leaves"]
    assert [(row["leaf"], row["is"]) for row in rows] == [
        ("opt_state/mu", ["int32[4]", "-"]),
        ("opt_state/nu", ["-", "float32[4]"]),
    ]


def test_rm_never_removes_the_last_valid_one_unless_forced(capfd):
    damage(10)
    assert found(capfd, "rm", "a", "--step", "newest")["step"] == 30
    text = output(capfd, "rm", "a", "--step", "20", code=2)
    assert "is the last valid one" in text
    assert found(capfd, "rm", "a", "--step", "10")["bytes"] > 1000
    (advice,) = [part for part in text.split("jtrain ")[1:] if "--force" in part]
    assert main(advice.split()) == 0
    assert list(Path(RUN).iterdir()) == []


def test_rm_is_refused_while_a_run_holds_the_lock(capfd):
    held = lock.WriteLock(Path(RUN))
    assert "writes there since" in output(capfd, "rm", "a", "--step", "10", code=2)
    held.release()
    shutil.copytree(Path(RUN, "10"), Path(RUN, "10.damaged"))
    assert found(capfd, "rm", "a", "--damaged")["bytes"] > 1000
    assert sorted(path.name for path in Path(RUN).iterdir()) == ["10", "20", "30"]


def test_rm_damaged_removes_those_that_verify_names_and_no_valid_one(capfd):
    damage(10)
    damage(30)
    shutil.copytree(Path(RUN, "20"), Path(RUN, "40.damaged"))
    advised = output(capfd, "verify", "a", code=70).splitlines()[-1].partition("jtrain ckpt ")[2]
    said = found(capfd, *advised.split())
    assert said["removed"] == ["10", "30", "40.damaged"]
    assert said["bytes"] > 3000
    assert [path.name for path in Path(RUN).iterdir()] == ["20"]
    assert output(capfd, "verify", "a").startswith("20  valid")
    assert "none is damaged; 0 B freed" in output(capfd, "rm", "a", "--damaged")


def test_others_and_init_from_read_an_export(capfd):
    said = found(capfd, "export", "a", "--step", "best")
    assert said == {"out": "a-20.safetensors", "step": 20, "tensors": 2, "bytes": said["bytes"]}
    assert Path(said["out"]).stat().st_size == said["bytes"]
    theirs = load_file(said["out"])
    assert sorted(theirs) == ["bias", "block.kernel"]
    np.testing.assert_array_equal(theirs["block.kernel"], state(20)["params"]["block"]["kernel"])
    assert sorted(TensorFile(Path(said["out"])).found) == ["bias", "block/kernel"]
    said = found(capfd, "export", "a", "--all", "--out", "out/all.safetensors")
    theirs = load_file("out/all.safetensors")
    assert sorted(theirs) == ["opt_state.mu", "params.bias", "params.block.kernel", "rng"]
    assert theirs["rng"].dtype == np.uint32
    assert [path.name for path in Path("out").iterdir()] == ["all.safetensors"]
