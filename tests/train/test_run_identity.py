"""The checkpoints of a run define its values, its data and its id."""

import errno
import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_disks import Disk
from quick_study import At, PowerCutError, at_home, config_of, cut, kept, trained, write_study

from jtrain.checkpoint import layout
from jtrain.checkpoint.init_from import open_source
from jtrain.cli import main
from jtrain.errors import FAULT, ConfigError, DamagedError, DataError
from jtrain.io import disk_errors
from jtrain.train.restore import evaluate_run
from jtrain.train.run_dir import RunDir
from jtrain.train.run_result import RunResult

CONFIG = "configs/quick.yaml"
RUN, CHECKPOINTS = Path("runs/quick"), Path("runs/quick/checkpoints")
SHORT = "checkpoint.every=4", "evaluate.every=0", "log.every=4"


@pytest.fixture(scope="module")
def cut_runs(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """Return a home with two runs cut off at step 10: quick, and foreign with another seed."""
    home = tmp_path_factory.mktemp("runs")
    write_study(home)
    with pytest.MonkeyPatch.context() as patch:
        at_home(home, patch, compiled)
        for name, more in (("quick", ()), ("foreign", ("seed=1",))):
            with pytest.raises(PowerCutError):
                trained(CONFIG, *SHORT, *more, f"name={name}", hooks=[At(10, cut)])
    return home


@pytest.fixture(autouse=True)
def _home(cut_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    shutil.copytree(cut_runs, tmp_path / "home")
    at_home(tmp_path / "home", monkeypatch, compiled)


@pytest.fixture
def whole(unbroken) -> dict[str, bytes]:
    """Return the result of the uninterrupted run."""
    return unbroken(*SHORT)


def again(*settings: str) -> RunResult:
    return trained(CONFIG, *SHORT, *settings)


def said(path: Path = RUN) -> dict:
    return json.loads((path / "run.json").read_text())


def foreign(step: int, *, place: int) -> None:
    """Copy a step of another run over a step of this one, or in as a new one."""
    shutil.rmtree(CHECKPOINTS / f"{place}", ignore_errors=True)
    shutil.copytree(f"runs/foreign/checkpoints/{step}", CHECKPOINTS / f"{place}")


HURTS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "other types": lambda path: path.write_text(
        '{"status": [], "step": "x", "sets": 1, "data": {}, "readers": [1], "id": 3, '
        '"tokenizer": 4, "seconds_per_step": "NaN", "seconds_per_save": null}'
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("hurt", HURTS.values(), ids=HURTS)
def test_with_run_json_lost_other_values_are_refused_all_the_same(hurt):
    before, run = (RUN / "config.yaml").read_bytes(), said()["id"]
    hurt(RUN / "run.json")
    with pytest.raises(ConfigError) as refusal:
        again("seed=1")
    assert "seed: 0 there, 1 here" in str(refusal.value)
    assert "jtrain run runs/quick/config.yaml name=quick" in str(refusal.value)
    assert (RUN / "config.yaml").read_bytes() == before
    owner = RunDir(RUN).owner()
    assert owner is not None
    assert owner.run == run


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deleted", "other types"])
def test_with_run_json_lost_the_same_command_resumes_to_the_same_bits(name, whole):
    facts = said()
    HURTS[name](RUN / "run.json")
    (RUN / "config.yaml").unlink()
    outcome = again()
    assert "resumes from step 8 of 12" in outcome.directory.log.read_text()
    assert kept(outcome) == whole
    for each in ("id", "data", "sets", "place"):
        assert said()[each] == facts[each], f"{each} comes from the checkpoint"
    assert said()["readers"] == [[0, 1], [8, 1]]
    words = "is missing" if name == "deleted" else ""
    assert f"runs/quick/run.json {words}" in outcome.directory.log.read_text()
    assert config_of(RUN / "config.yaml") == config_of(CONFIG, SHORT)


@pytest.mark.thorough
def test_other_data_is_refused_with_run_json_lost():
    (RUN / "run.json").unlink()
    study = Path("experiments/quick.py")
    study.write_text(study.read_text().replace("points(self.data.rows, 0)", "points(200, 7)"))
    with pytest.raises(DataError, match=r"runs/quick was trained on\n  200 rows "):
        again()


@pytest.mark.thorough
def test_with_config_yaml_edited_following_the_advice_resumes_with_the_old_values(whole):
    file = RUN / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.03", "lr: 0.5"))
    assert config_of(file) != config_of(CONFIG, SHORT)
    with pytest.raises(ConfigError) as refusal:
        trained(file)
    words = str(refusal.value)
    assert "with other values" in words
    advised = shlex.split(words.rpartition("or resume that one: jtrain run ")[2])
    assert advised[0] == str(file)
    with pytest.raises(ConfigError, match=r"may differ. The run's values: optimizer.lr=0.03"):
        evaluate_run(config_of(file), RUN)
    assert kept(trained(*advised)) == whole
    assert config_of(file) == config_of(CONFIG, SHORT), "and it is put right"


@pytest.mark.thorough
@pytest.mark.parametrize(("step", "place"), [(8, 8), (8, 12)])
def test_a_checkpoint_of_another_run_is_set_aside_and_not_resumed_from(step, place, whole):
    foreign(step, place=place)
    outcome = again()
    log = outcome.directory.log.read_text()
    run = said(Path("runs/foreign"))["id"]
    aside = f"checkpoint {place} was set aside as"
    if place != step:
        assert f"seal.json: is of step {step} (and 1 more)" in log
    else:
        assert f"seal.json: is a checkpoint of another run ({run}), and this run is " in log
    assert f"{aside} {CHECKPOINTS.absolute() / f'{place}.foreign'}: " in log
    assert (CHECKPOINTS / f"{place}.foreign" / "seal.json").exists(), "nothing is deleted"
    assert kept(outcome) == whole


@pytest.mark.thorough
def test_who_only_reads_is_told_of_a_foreign_checkpoint_and_not_given_it(capfd):
    foreign(8, place=8)
    step, _ = evaluate_run(config_of(RUN / "config.yaml"), RUN)
    assert step == 4
    with pytest.raises(DamagedError, match=r"another run .* eval takes --step 4"):
        evaluate_run(config_of(RUN / "config.yaml"), RUN, 8)
    assert main(["ckpt", "verify", "quick"]) == 70
    out = capfd.readouterr().out
    assert "4  valid" in out
    assert "8  OF ANOTHER RUN" in out
    assert main(["ckpt", "ls", "quick", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["steps"]
    assert [(row["step"], row["foreign"], row["marks"]) for row in rows] == [
        (4, False, ["newest"]),
        (8, True, []),
    ]
    assert main(["ckpt", "show", "quick"]) == 0
    assert "/4\n" in capfd.readouterr().out
    assert main(["ckpt", "rm", "quick", "--step", "4"]) == 2, "it is the last whole one of the run"
    assert open_source("quick").where.endswith("/8"), "where nobody says whose it should be"
    assert open_source("quick", owner_of=lambda path: RunDir(path).owner()).where.endswith("/4"), (
        "what init_from starts from"
    )


# Copies


@pytest.mark.thorough
def test_a_copy_is_another_run_from_where_it_was_copied(whole, capfd):
    shutil.copytree(RUN, "runs/copy")
    original = said()["id"]
    assert again().status == "done"
    shutil.copytree(CHECKPOINTS / "12", "runs/copy/checkpoints/12")
    for rows in ("metrics.jsonl", "steps.jsonl"):  # those that the checkpoint knows of
        shutil.copy(RUN / rows, "runs/copy")
    assert main(["run", "runs/copy/config.yaml"]) == 2
    on = shlex.split(capfd.readouterr().err.partition("To resume that run: jtrain ")[2])[:3]
    assert on == ["run", "runs/copy/config.yaml", "name=copy"]
    assert main([*on, "steps=14"]) == 0
    log = Path("runs/copy/log.txt").read_text()
    assert "runs/copy was copied or moved from runs/quick: it is a separate run from now on" in log
    assert f"another run ({original} after the copy)" not in log, "the copy was made before step 12"
    copy = said(Path("runs/copy"))
    assert copy["id"] != original
    assert copy["ancestors"] == {original: 12}
    assert said()["id"] == original
    (Path("runs/copy/run.json")).unlink()
    owner = RunDir(Path("runs/copy")).owner()
    assert owner is not None
    assert (owner.run, dict(owner.ancestors)) == (copy["id"], copy["ancestors"])


@pytest.mark.thorough
def test_a_run_that_was_renamed_resumes_under_its_new_name(whole):
    RUN.rename("runs/other")
    outcome = trained(CONFIG, *SHORT, "name=other")
    assert "resumes from step 8 of 12" in outcome.directory.log.read_text()
    assert kept(outcome) == whole


@pytest.mark.parametrize("name", ["seal.json", "/8", "run.json"])
def test_a_checkpoint_that_cannot_be_read_now_stays_where_it_is(name, monkeypatch, capfd):
    rows = (RUN / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(disk_errors, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        Disk(patch, name, errno.ESTALE, times=math.inf)
        assert main(["run", CONFIG, *SHORT]) == FAULT
    assert "mv " not in capfd.readouterr().err
    assert layout.list_named_steps(CHECKPOINTS) == [4, 8]
    assert (RUN / "metrics.jsonl").read_bytes() == rows
