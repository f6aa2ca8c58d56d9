"""A replayed step has the bits of the run, and the cause of a difference is named."""

import json
import re

import pytest
from quick_study import CODE, at_home, read_otherwise, trained, write_study

from jtrain.checkpoint import fingerprint
from jtrain.cli import main
from jtrain.train.hooks.metrics import read_results
from jtrain.train.hooks.step_record import read_step_records

SETTINGS = ("steps=12", "checkpoint.every=5", "checkpoint.keep=9", "log.every=4")


def replayed(capsys: pytest.CaptureFixture[str], step: int, *typed: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["replay", "quick", "--step", f"{step}", "--json", *typed])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.thorough
def test_recorded_steps_have_the_numbers_of_the_metrics(study):
    outcome = trained(study, *SETTINGS)
    known = read_step_records(outcome.directory.steps)
    assert list(known) == list(range(1, 13))
    for step, row in read_results(outcome.directory.metrics, "").items():
        assert (known[step].loss, known[step].grad_norm) == (row["loss"], row["grad_norm"])
    assert len({step.batch for step in known.values()}) == 12, "no two batches are the same"


def test_a_replayed_step_has_the_same_bits(study, capsys):
    trained(study, *SETTINGS)
    code, found = replayed(capsys, 9, "--only-again")
    assert code == 0
    assert (found["start"], found["compared"], found["other"]) == (5, 4, None)
    assert found["replayed"] == found["recorded"]
    assert found["checkpoint"] is None


@pytest.mark.thorough
def test_a_replay_ends_at_a_checkpoint_with_its_bits(study, capsys):
    trained(study, *SETTINGS)
    code, found = replayed(capsys, 10, "--only-again")
    assert (code, found["start"], found["checkpoint"]) == (0, 5, [])


@pytest.mark.thorough
def test_an_invalid_checkpoint_is_skipped_for_an_older_one(study, capsys, monkeypatch):
    outcome = trained(study, *SETTINGS)
    read = fingerprint.read

    def otherwise(begun):  # for the first checkpoint read, although its files are complete
        monkeypatch.setattr(fingerprint, "read", read)
        return dict.fromkeys(read(begun), "0" * 16)

    monkeypatch.setattr(fingerprint, "read", otherwise)
    code, found = replayed(capsys, 11, "--only-again")
    assert (code, found["start"], found["compared"], found["other"]) == (0, 5, 6, None)
    (outcome.directory.checkpoints / "10" / "about.json").write_text("{}")
    assert replayed(capsys, 11, "--only-again")[1]["start"] == 5


@pytest.mark.thorough
def test_it_also_runs_without_jit_and_with_checks(study, capsys):
    trained(study, *SETTINGS)
    code, found = replayed(capsys, 3)
    looked = found["dissected"]
    assert (code, found["start"]) == (0, 0)
    assert looked["eager_loss"] == pytest.approx(found["replayed"][0], rel=1e-6)
    assert looked["eager_grad_norm"] == pytest.approx(found["replayed"][1], rel=1e-6)
    assert looked["checks"] == ""
    assert set(looked["leaves"]["ratio"]) == {"up", "bias", "down"}
    capsys.readouterr()
    main(["replay", "quick", "--step", "3"])
    said = capsys.readouterr().out
    assert "the same bits as in the run, in 3 of 3 steps since the beginning" in said
    assert "every value finite, every index within bounds" in said


@pytest.mark.thorough
def test_steps_of_one_call_are_replayed_in_one_call(study, capsys):
    trained(study, *SETTINGS, "steps_per_call=4", "checkpoint.every=4", "evaluate.every=4")
    code, found = replayed(capsys, 7)
    assert (code, found["start"], found["compared"]) == (0, 4, 4)
    assert found["replayed"] == found["recorded"]
    assert found["dissected"]["eager_loss"] == pytest.approx(found["replayed"][0], rel=1e-5)


@pytest.mark.thorough
def test_errors_of_the_checks_are_reported(tmp_path, monkeypatch, compiled, capsys):
    code = CODE.replace(
        'return cross_entropy(x @ params["down"], batch["label"], batch["mask"])',
        """logits = x @ params["down"]
            far = batch["x"][:, 0] > 0
            return jt.Mean.of(jnp.where(far, jnp.sqrt(0 * logits[:, 0]), 0) ** 2, batch["mask"])""",
    )
    path = write_study(tmp_path, code)
    at_home(tmp_path, monkeypatch, compiled)
    trained(path.relative_to(tmp_path), *SETTINGS)
    _, found = replayed(capsys, 1)
    assert found["dissected"]["checks"].startswith(("nan generated", "division"))


@pytest.mark.thorough
def test_the_first_differing_step_is_named(study, capsys):
    outcome = trained(study, *SETTINGS)
    file = outcome.directory.steps
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 10)
    place = 8 - (row["step"] - len(row["loss"]) + 1)
    row["loss"][place] *= 1 + 2**-22
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, found = replayed(capsys, 9, "--only-again")
    assert code == 70
    assert found["other"]["step"] == 8
    capsys.readouterr()
    main(["replay", "quick", "--step", "9", "--only-again"])
    said = capsys.readouterr().out
    assert "DIFFERENT from step 8 on, on the same batch" in said
    assert "are those of the run (run.json). Replay it once more: " in said
    facts = outcome.directory.facts()
    packages = {**facts["packages"], "jax": "0.9.0"}
    outcome.directory.write_status(
        "done", readers=[[0, 3]], devices=["cpu:0 cpu"] * 3, packages=packages
    )
    main(["replay", "quick", "--step", "9", "--only-again", "parallel.kind=mirrored"])
    said = capsys.readouterr().out
    # On 8 devices an earlier step may round differently.
    assert re.search(r"DIFFERENT from step [678] on, on a batch that was not compared", said)
    assert "The likely cause: processes: 3 then, 1 now; packages.jax: 0.9.0 then, 0." in said
    assert "; devices: 3 x cpu then, 8 x cpu now; parallel.kind: single then, mirrored n" in said
    assert "a device computes wrongly" not in said
    assert "jtrain launch --processes 3 replay quick --step 9" in said


@pytest.mark.thorough
def test_changed_data_is_named(study, capsys):
    outcome = trained(study, *SETTINGS)
    file = outcome.directory.steps
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["batch"][3] ^= 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", "quick", "--step", "4", "--only-again"]) == 70
    assert "DIFFERENT from step 4 on: its batch differs" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_batch_of_another_process_count_is_not_compared(study, capsys):
    outcome = trained(study, *SETTINGS)
    directory = outcome.directory
    assert directory.facts()["readers"] == [[0, 1]]
    digest = read_step_records(directory.steps)[9].batch
    read_otherwise(directory.steps)
    directory.write_status("done", readers=[[0, 2]])
    capsys.readouterr()
    assert main(["replay", "quick", "--step", "9", "--only-again"]) == 0
    said = capsys.readouterr().out
    assert f"digest {digest}," in said, "as steps.jsonl has it"
    assert "the same bits as in the run, in 4 of 4 steps" in said
    assert "batches: not compared: 2 processes read them in the run and 1 now" in said
    assert "jtrain launch --processes 2 replay quick --step 9" in said
    directory.write_status("done", readers=[[0, 2], [8, 1]])
    assert main(["replay", "quick", "--step", "9", "--only-again"]) == 70
    said = capsys.readouterr().out
    assert f"DIFFERENT from step 9 on: its batch differs, digest {digest ^ 1} in the run" in said


@pytest.mark.thorough
def test_a_missing_step_raises(study, capsys):
    trained(study, *SETTINGS)
    capsys.readouterr()
    assert main(["replay", "quick", "--step", "13"]) == 2
    assert "write --step 12" in capsys.readouterr().err
