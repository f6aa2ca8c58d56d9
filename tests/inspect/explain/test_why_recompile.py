"""What is compiled again has a reason with advice, and the advice works."""

import json
from pathlib import Path

import pytest
from quick_study import config_of, write_study

from jtrain.cli import main
from jtrain.inspect.explain.recompile import advise, compare_with_run
from jtrain.train.first_batch.first_rows import FirstRows
from jtrain.train.program_signature import (
    ARGUMENTS,
    compare_signatures,
    program_signature,
    read_compiles,
    record_compile,
)
from jtrain.train.setup import TrainSetup, set_up


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path)


def setup_of(path: Path, *settings: str) -> TrainSetup:
    return set_up(config_of(path, settings))


def changes(path: Path, *settings: str) -> dict[str, str]:
    before = program_signature(setup_of(path))
    after = program_signature(setup_of(path, *settings))
    return {c.name: advise(c) for c in compare_signatures(before, after)}


def test_what_enters_no_program_is_no_reason(study):
    assert changes(study, "seed=3", "log.every=2", "evaluate.every=0") == {}
    cadence = changes(study, "checkpoint.every=3", "evaluate.every=0")
    assert list(cadence) == ["steps_per_call"]
    assert "the smallest cadence" in cadence["steps_per_call"]


def test_rows_values_and_layouts_are_reasons(study):
    rows = changes(study, "batch=32")
    assert "batch=16 needs the old one" in rows["batch/x"]
    assert "Type batch=16" in rows["batch"]
    assert "Type optimizer.lr=0.03" in changes(study, "optimizer.lr=0.1")["optimizer.lr"]
    assert "model.width=8" in changes(study, "model.width=16")["model.width"]
    split = changes(study, "parallel={kind: fsdp, devices: 4, min_size: 0}")
    assert "its sharding changed" in split["state/params/down"]
    assert "compiled once" in split["devices"]
    assert "steps_per_call" in changes(study, "steps_per_call=2", "checkpoint.every=6")


def test_the_advised_value_needs_the_old_program(study):
    """As the advice says, and as JAX's cache of programs sees it."""
    old = setup_of(study).lower_step().as_text()
    assert setup_of(study, "batch=32", "optimizer.lr=0.1").lower_step().as_text() != old
    assert setup_of(study, "batch=16", "optimizer.lr=0.03").lower_step().as_text() == old


def test_edited_code_is_a_reason(study):
    code = Path("experiments/quick.py")
    before = program_signature(setup_of(study))
    code.write_text(code.read_text().replace("jnp.tanh", "jnp.sin"))
    (change,) = compare_signatures(before, program_signature(setup_of(study)))
    assert (change.part, change.name) == ("code", "experiments.quick")
    assert "was edited" in advise(change)


def test_a_run_records_its_compiles_and_the_verb_compares(study, capsys):
    assert main(["explain", str(study), "--why-recompile"]) == 2
    assert "quick is no directory of a run" in capsys.readouterr().err
    assert main(["run", str(study), "steps=4", "evaluate.every=0"]) == 0
    run = Path("runs/quick")
    assert [c.step for c in read_compiles(run / "compiles.jsonl")] == [0]
    capsys.readouterr()
    assert main(["explain", str(study), "steps=4", "evaluate.every=0", "--why-recompile"]) == 0
    assert "nothing has changed" in capsys.readouterr().out
    record_compile(run / "compiles.jsonl", setup_of(study, "steps=4"), 4)  # the same program
    record_compile(run / "compiles.jsonl", setup_of(study, "steps=8", "batch=32"), 4)
    assert '"signature"' not in (run / "compiles.jsonl").read_text().splitlines()[1]
    assert main(["explain", str(study), "steps=8", "batch=64", "--why-recompile"]) == 0
    shown = capsys.readouterr().out
    assert "its last two programs differ" in shown
    assert "float32[16,2] -> float32[32,2]" in shown
    assert "float32[32,2] -> float32[64,2]" in shown
    assert main(["explain", str(study), "--why-recompile", "quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {c["name"] for c in found["last"]} >= {"batch/x", "batch", "steps"}
    assert compare_with_run(run, setup_of(study, "steps=8", "batch=32")).now == ()


@pytest.mark.thorough
def test_a_run_without_a_record_says_how_to_get_one(study, capsys):
    settings = ["steps=4", "evaluate.every=0"]
    assert main(["run", str(study), *settings]) == 0
    record = Path("runs/quick/compiles.jsonl")
    record.unlink()
    capsys.readouterr()
    assert main(["explain", str(study), *settings, "--why-recompile"]) == 2
    assert "jtrain run runs/quick/config.yaml steps=8" in capsys.readouterr().err
    assert main(["run", "runs/quick/config.yaml", "steps=8"]) == 0
    assert [c.step for c in read_compiles(record)] == [4]


def test_no_batch_is_read_after_the_step_is_compiled(study):
    setup, read = setup_of(study), []
    batches = setup.own_rows(setup.experiment.train)

    class Watched:
        size = batches.size

        def __getitem__(self, step):
            read.append(step)
            return batches[step]

    vars(setup)["first"] = FirstRows(Watched(), 1)
    setup.lower_step()
    setup.first.forget()
    read.clear()
    signature = program_signature(setup)
    assert "batch/x" in signature[ARGUMENTS]
    assert read == [], "a reader that goes back begins anew"
