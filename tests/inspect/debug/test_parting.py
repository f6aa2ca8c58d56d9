"""`jtrain diff` names the first step, batch, number and leaf in which two runs differ."""

import json

import pytest
from quick_study import read_otherwise, trained

from jtrain.cli import main

SETTINGS = ("steps=12", "checkpoint.every=4", "checkpoint.keep=9", "evaluate.every=6")


def diff(capsys: pytest.CaptureFixture[str], one: str, other: str) -> tuple[dict, str]:
    capsys.readouterr()
    assert main(["diff", one, other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["diff", one, other]) == 0
    return found, capsys.readouterr().out


@pytest.mark.thorough
def test_a_repeated_run_has_no_difference(study, capsys):
    trained(study, *SETTINGS, "name=one")
    trained(study, *SETTINGS, "name=other")
    found, said = diff(capsys, "one", "other")
    assert found["nothing"]
    assert (found["values"], found["facts"], found["compared"]) == ([], [], 12)
    assert found["checkpoints"] == [4, 8, 12]
    assert "equal in the 12 steps of both runs" in said
    assert "equal in every leaf at step 4, 8, 12" in said


@pytest.mark.thorough
def test_another_value_is_found_where_it_takes_effect(study, capsys):
    trained(study, *SETTINGS, "name=one")
    trained(study, *SETTINGS, "name=other", "optimizer.lr=4e-2")
    found, said = diff(capsys, "one", "other")
    assert [tuple(change) for change in found["values"]] == [("optimizer.lr", 0.03, 0.04)]
    assert found["batch"] is None
    assert (found["number"]["step"], found["number"]["name"]) == (1, "update_norm")
    assert (found["same"], found["checkpoint"]) == (None, 4)
    assert "optimizer.lr: 0.03 | 0.04" in said
    assert "leaves differ at step 4" in said


@pytest.mark.thorough
def test_other_data_is_reported_as_other_data(study, capsys):
    trained(study, *SETTINGS, "name=one")
    trained(study, *SETTINGS, "name=other", "data.rows=190")
    found, said = diff(capsys, "one", "other")
    assert found["batch"] == 1
    assert "batch   differs first at step 1: the data differs" in said


@pytest.mark.thorough
def test_batches_of_other_process_counts_are_not_compared(study, capsys):
    trained(study, *SETTINGS, "name=one")
    other = trained(study, *SETTINGS, "name=other").directory
    read_otherwise(other.steps)
    other.write_status("done", readers=[[0, 2]])
    found, said = diff(capsys, "one", "other")
    assert (found["batch"], found["readers"]) == (None, [1, 2])
    assert (
        "not compared: 1 process read the batches of one and 2 processes read the batches of"
        in said
    )
    other.write_status("done", readers=[[0, 2], [6, 1]])
    found, said = diff(capsys, "one", "other")
    assert (found["batch"], found["readers"]) == (7, [1, 2])


@pytest.mark.thorough
def test_a_late_difference_is_found(study, capsys):
    outcome = trained(study, *SETTINGS, "name=one")
    other = trained(study, *SETTINGS, "name=other")
    file = other.directory.steps
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = next(row for row in rows if row["step"] == 8)
    last["loss"][-1] += 1e-6
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = other.directory.metrics
    lines = metrics.read_text().splitlines()
    metrics.write_text("".join(line + "\n" for line in lines if '"step": 8,' not in line))
    found, _ = diff(capsys, str(outcome.directory.path), "other")
    assert (found["number"]["step"], found["number"]["name"]) == (8, "loss")
    assert found["checkpoint"] is None


def test_a_directory_without_a_run_raises(study, capsys):
    trained(study, *SETTINGS, "name=one")
    capsys.readouterr()
    assert main(["diff", "one", "two"]) == 2
    assert "there is one" in capsys.readouterr().err
