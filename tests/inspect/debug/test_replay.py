"""`jtrain replay` has the bits of the run, and `jtrain diff` names where two runs part."""

import json
import re
import shutil
from pathlib import Path

import pytest
from quick_study import trained

from jtrain.cli import main
from jtrain.train.hooks.log import read_results
from jtrain.train.hooks.step_record import read_step_records
from jtrain.train.run_dir import RunDir

SETTINGS = ("steps=12", "checkpoint.every=5", "checkpoint.keep=9", "log.every=4")


@pytest.fixture
def run(copy_of) -> RunDir:
    return copy_of(*SETTINGS).directory


def replayed(capsys: pytest.CaptureFixture[str], step: int, *typed: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["replay", "quick", "--step", f"{step}", "--json", *typed])
    return code, json.loads(capsys.readouterr().out)


def diff(capsys: pytest.CaptureFixture[str], one: str, other: str) -> dict:
    capsys.readouterr()
    assert main(["diff", one, other, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def edit(file: Path, change) -> None:
    """Change the rows of a JSONL file by `change(rows)`."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_every_batch(rows) -> None:
    for row in rows:
        row["batch"] = [batch ^ 1 for batch in row["batch"]]


def change_step_8(rows) -> None:
    """Change the last bit of the loss of step 8."""
    row = next(row for row in rows if row["step"] == 10)
    row["loss"][-3] *= 1 + 2**-22


def drop_step_8(rows) -> None:
    rows[:] = [row for row in rows if row["step"] != 8]


def test_recorded_steps_have_the_numbers_of_the_metrics(run):
    known = read_step_records(run.steps)
    assert list(known) == list(range(1, 13))
    for step, row in read_results(run.metrics, "").items():
        assert (known[step].loss, known[step].grad_norm) == (row["loss"], row["grad_norm"])
    assert len({step.batch for step in known.values()}) == 12, "no two batches are the same"


def test_a_replayed_step_has_the_same_bits(run, capsys):
    code, found = replayed(capsys, 9)
    assert code == 0
    assert (found["start"], found["compared"], found["other"]) == (5, 4, None)
    assert found["replayed"] == found["recorded"]
    assert found["checkpoint"] is None


@pytest.mark.thorough
def test_a_replay_ends_at_a_checkpoint_with_its_bits_and_skips_an_invalid_one(run, capsys):
    code, found = replayed(capsys, 10)
    assert (code, found["start"], found["checkpoint"]) == (0, 5, [])
    (run.checkpoints / "10" / "about.json").write_text("{}")
    code, found = replayed(capsys, 11)
    assert (code, found["start"], found["compared"], found["other"]) == (0, 5, 6, None)


@pytest.mark.thorough
def test_steps_of_one_call_are_replayed_in_one_call(run, capsys):
    shutil.rmtree(run.path)
    calls = ("steps_per_call=4", "checkpoint.every=4", "evaluate.every=4")
    trained("configs/quick.yaml", *SETTINGS, *calls)
    code, found = replayed(capsys, 7)
    assert (code, found["start"], found["compared"]) == (0, 4, 4)
    assert found["replayed"] == found["recorded"]


@pytest.mark.thorough
def test_the_first_differing_step_is_named_with_its_likely_cause(run, capsys):
    edit(run.steps, change_step_8)
    code, found = replayed(capsys, 9)
    assert (code, found["other"]["step"]) == (70, 8)
    packages = {**run.facts()["packages"], "jax": "0.9.0"}
    run.write_status("done", readers=[[0, 3]], devices=["cpu:0 cpu"] * 3, packages=packages)
    main(["replay", "quick", "--step", "9", "parallel.kind=mirrored"])
    said = capsys.readouterr().out
    # On 8 devices an earlier step may round differently.
    assert re.search(r"DIFFERENT from step [678] on, on a batch that was not compared", said)
    assert "The likely cause: processes: 3 then, 1 now; packages.jax: 0.9.0 then, 0." in said
    assert "jtrain launch --processes 3 replay quick --step 9" in said


@pytest.mark.thorough
def test_changed_data_is_named_and_batches_of_other_processes_are_not_compared(run, capsys):
    whole = run.steps.read_bytes()
    edit(run.steps, lambda rows: rows[0]["batch"].__setitem__(3, rows[0]["batch"][3] ^ 1))
    assert main(["replay", "quick", "--step", "4"]) == 70
    assert "DIFFERENT from step 4 on: its batch differs" in capsys.readouterr().out
    run.steps.write_bytes(whole)
    edit(run.steps, change_every_batch)
    run.write_status("done", readers=[[0, 2]])
    assert main(["replay", "quick", "--step", "9"]) == 0
    said = capsys.readouterr().out
    assert "batches: not compared: 2 processes read them in the run and 1 now" in said
    assert "jtrain launch --processes 2 replay quick --step 9" in said


def test_a_missing_step_or_run_is_named(run, capsys):
    assert main(["replay", "quick", "--step", "13"]) == 2
    assert "write --step 12" in capsys.readouterr().err
    assert main(["diff", "quick", "two"]) == 2
    assert "there is quick" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_repeated_run_has_no_difference(run, capsys):
    trained("configs/quick.yaml", *SETTINGS, "name=other")
    found = diff(capsys, "quick", "other")
    assert found["nothing"]
    assert (found["values"], found["facts"], found["compared"]) == ([], [], 12)
    assert found["checkpoints"] == [5, 10, 12]


@pytest.mark.thorough
def test_another_value_is_found_where_it_takes_effect(run, capsys):
    trained("configs/quick.yaml", *SETTINGS, "name=faster", "optimizer.lr=4e-2")
    found = diff(capsys, "quick", "faster")
    assert [tuple(change) for change in found["values"]] == [("optimizer.lr", 0.03, 0.04)]
    assert found["batch"] is None
    assert found["number"]["step"] == 2
    assert found["number"]["name"] in {"loss", "grad_norm"}
    assert (found["same"], found["checkpoint"]) == (None, 5)
    trained("configs/quick.yaml", *SETTINGS, "name=shorter", "data.rows=190")
    assert diff(capsys, "quick", "shorter")["batch"] == 1


@pytest.mark.thorough
def test_a_late_difference_is_found(run, capsys):
    shutil.copytree(run.path, "runs/other")
    other = Path("runs/other")
    edit(other / "steps.jsonl", change_step_8)
    edit(other / "metrics.jsonl", drop_step_8)
    found = diff(capsys, str(run.path), "other")
    assert (found["number"]["step"], found["number"]["name"]) == (8, "loss")
    assert found["checkpoint"] is None
