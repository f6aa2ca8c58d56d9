"""The checkpoints of a run define its values, its data and its id."""

import errno
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from permissions import permissions_hold
from quick_study import at_home, config_of, kept, trained, write_study
from unreachable_files import Disk

import jtrain as jt
from jtrain.checkpoint import layout, seal
from jtrain.checkpoint.weights_source import open_source
from jtrain.cli import main
from jtrain.errors import FAULT, ConfigError, DamagedError, DataError
from jtrain.io import transient
from jtrain.train import run_dir
from jtrain.train.restore_run import evaluate_run
from jtrain.train.run_dir import RunDir
from jtrain.train.run_record import find_owner, read_record
from jtrain.train.run_result import RunResult

thorough = pytest.mark.thorough
CONFIG = "configs/quick.yaml"
RUN, CHECKPOINTS = Path("runs/quick"), Path("runs/quick/checkpoints")
SHORT = "checkpoint.every=4", "evaluate.every=0", "log.every=4"


class PowerCutError(BaseException):
    """Ends a run where it stands."""


def cut_at(last: int):
    def cut(step, state):
        if step == last:
            raise PowerCutError

    return cut


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> tuple[Path, dict[str, bytes]]:
    """Return a folder with two runs cut off at step 10, and the result of quick if uninterrupted.

    The runs are quick, and foreign with another seed.
    """
    place = tmp_path_factory.mktemp("runs")
    write_study(place)
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, compiled)
        for name, more in (("quick", ()), ("foreign", ("seed=1",))):
            with pytest.raises(PowerCutError):
                trained(CONFIG, *SHORT, *more, f"name={name}", hooks=[cut_at(10)])
        whole = kept(trained(CONFIG, *SHORT, "name=whole"))
        shutil.rmtree(place / "runs" / "whole")
    return place, whole


@pytest.fixture(autouse=True)
def _home(runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    shutil.copytree(runs[0], tmp_path / "home")
    at_home(tmp_path / "home", monkeypatch, compiled)


@pytest.fixture
def whole(runs) -> dict[str, bytes]:
    """Return the result of the uninterrupted run."""
    return runs[1]


def again(*settings: str) -> RunResult:
    return trained(CONFIG, *SHORT, *settings)


def said(path: Path = RUN) -> dict:
    return json.loads((path / "run.json").read_text())


def foreign(step: int, *, place: int) -> None:
    """Copy a step of another run over a step of this one, or in as a new one."""
    shutil.rmtree(CHECKPOINTS / f"{place}", ignore_errors=True)
    shutil.copytree(f"runs/foreign/checkpoints/{step}", CHECKPOINTS / f"{place}")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


HURTS: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
    "torn": lambda path: path.write_text("{"),
    "no object": lambda path: path.write_text("{}"),
    "list": lambda path: path.write_text("[1]"),
    "null": lambda path: path.write_text("null"),
    "not UTF-8": lambda path: path.write_bytes(b'{"status": "\xff"}'),
    "nested": lambda path: path.write_text('{"status": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "without a step": lambda path: path.write_text('{"status": "done"}'),
    "other types": lambda path: path.write_text(
        '{"status": [], "step": "x", "sets": 1, "data": {}, "readers": [1], "id": 3, '
        '"tokenizer": 4, "seconds_per_step": "NaN", "seconds_per_save": null}'
    ),
    "long": lambda path: os.truncate(path, 1 << 40),
    "a pipe": fifo,
}


def test_a_run_has_one_id_which_every_checkpoint_seals():
    run = said()["id"]
    assert [seal.sealed_run(path) for path in CHECKPOINTS.glob("[0-9]*")] == [run, run]
    assert said(Path("runs/foreign"))["id"] != run
    there = again().directory
    assert said()["id"] == run
    assert {
        seal.sealed_run(there.checkpoints / f"{n}") for n in layout.list_steps(CHECKPOINTS)
    } == {run}
    about = json.loads((CHECKPOINTS / "12/about.json").read_text())["about"]
    assert about["identity"]["id"] == run
    assert about["identity"]["config"]["optimizer"]["lr"] == 0.03


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hurt", HURTS.values(), ids=HURTS)
def test_with_run_json_lost_other_values_are_refused_all_the_same(hurt):
    before, run = (RUN / "config.yaml").read_bytes(), said()["id"]
    hurt(RUN / "run.json")
    for setting, told in (
        ("seed=1", "seed: 0 there, 1 here"),
        ("optimizer.lr=1", "optimizer.lr: 0.03 there, 1.0 here"),
        ("batch=8", "batch: 16 there, 8 here"),
    ):
        with pytest.raises(ConfigError) as refusal:
            again(setting)
        assert told in str(refusal.value)
        assert "jtrain run runs/quick/config.yaml name=quick" in str(refusal.value)
    assert (RUN / "config.yaml").read_bytes() == before
    owner = find_owner(RUN)
    assert owner is not None
    assert owner.run == run


@pytest.mark.parametrize(
    "name", ["deleted", *(pytest.param(n, marks=thorough) for n in ("nested", "other types"))]
)
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


@pytest.mark.parametrize("name", ["run.json", "samples.txt", "log.txt", "metrics.jsonl.new"])
@pytest.mark.parametrize(
    ("make", "kind"), [(Path.mkdir, "a directory"), (os.mkfifo, "a named pipe")]
)
def test_what_lies_in_the_place_of_a_file_is_told_before_anything_is_trained(
    name, make, kind, capfd
):
    (RUN / name).unlink(missing_ok=True)
    make(RUN / name)
    assert main(["run", CONFIG, *SHORT]) == 2
    err = capfd.readouterr().err
    assert f"{name} is {kind}, and should be a file. Move it away: " in err
    move = shlex.split(err.partition("Move it away: ")[2])
    Path(move[1]).rename(move[2])
    RunDir(RUN).check_files()


def test_other_data_is_refused_with_run_json_lost():
    (RUN / "run.json").unlink()
    study = Path("experiments/quick.py")
    study.write_text(study.read_text().replace("points(self.data.rows, 0)", "points(200, 7)"))
    with pytest.raises(DataError, match=r"runs/quick was trained on\n  200 rows "):
        again()


EDITS = {  # of config.yaml
    "a rate": ("lr: 0.03", "lr: 0.5"),
    "another kind": ("kind: adamw\n  lr: 0.03", "kind: sgd\n  lr: 0.03\n  momentum: 0.5"),
}


@pytest.mark.parametrize(
    "edit", [EDITS["a rate"], pytest.param(EDITS["another kind"], marks=thorough)]
)
def test_with_config_yaml_edited_following_the_advice_resumes_with_the_old_values(edit, whole):
    file = RUN / "config.yaml"
    text = file.read_text()
    if "sgd" in edit[1]:  # adamw has keys that sgd does not
        head, _, tail = text.partition("optimizer:\n")
        rest = tail[tail.index("\nprecision:") :]
        file.write_text(f"{head}optimizer:\n  {edit[1]}{rest}")
    else:
        file.write_text(text.replace(*edit))
    assert config_of(file) != config_of(CONFIG, SHORT)
    with pytest.raises(ConfigError) as refusal:
        trained(file)
    words = str(refusal.value)
    assert "with other values" in words
    advised = shlex.split(words.rpartition("or resume that one: jtrain run ")[2])
    assert advised[0] == str(file)
    with pytest.raises(
        ConfigError, match=r"was edited. For the values of the run type: '?optimizer"
    ):
        evaluate_run(config_of(file), RUN)
    assert kept(trained(*advised)) == whole
    assert config_of(file) == config_of(CONFIG, SHORT), "and it is put right"


@thorough
def test_with_config_yaml_edited_the_first_command_resumes():
    file = RUN / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.03", "lr: 0.5"))
    assert again().status == "done"
    assert config_of(file) == config_of(CONFIG, SHORT)


def test_a_config_yaml_that_no_typing_can_mend_is_passed_by():
    (RUN / "config.yaml").write_text("steps: [")
    with pytest.raises(ConfigError) as refusal:
        again("seed=1")
    assert str(refusal.value).rpartition("go on with that one: ")[2].endswith(" seed=0")
    assert again().status == "done"


@pytest.mark.parametrize(
    ("step", "place"), [(8, 8), *(pytest.param(*at, marks=thorough) for at in ((8, 12), (4, 4)))]
)
def test_a_checkpoint_of_another_run_is_set_aside_and_not_resumed_from(step, place, whole):
    foreign(step, place=place)
    outcome = again()
    log = outcome.directory.log.read_text()
    run = said(Path("runs/foreign"))["id"]
    if place != step:
        aside = f"checkpoint {place} was set aside as"
        assert f"seal.json: is of step {step} (and 1 more)" in log
    else:
        aside = f"checkpoint {place} was set aside as"
        assert f"seal.json: is a checkpoint of another run ({run}), and this run is " in log
    assert f"{aside} {CHECKPOINTS.absolute() / f'{place}.foreign'}: " in log
    assert (CHECKPOINTS / f"{place}.foreign" / "seal.json").exists(), "nothing is deleted"
    assert kept(outcome) == whole


@thorough
def test_a_newer_checkpoint_of_another_run_is_not_resumed_from():
    assert trained(CONFIG, *SHORT, "seed=1", "name=foreign").step == 12
    foreign(12, place=12)
    log = again().directory.log.read_text()
    assert "checkpoint 12 was set aside as " in log
    assert "resumes from step 8 of 12" in log


def test_where_damage_is_to_stop_a_foreign_checkpoint_stops():
    foreign(8, place=8)
    before = sorted(CHECKPOINTS.iterdir())
    with pytest.raises(DamagedError, match=r"is a checkpoint of another run .*=fall_back"):
        again("checkpoint.on_damage=stop")
    assert sorted(CHECKPOINTS.iterdir()) == before


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
    assert open_source("quick", owner_of=find_owner).where.endswith("/4"), (
        "what init_from starts from"
    )


def test_with_run_json_lost_and_checkpoints_of_two_runs_nothing_is_guessed(whole, capfd):
    foreign(8, place=8)
    (RUN / "run.json").unlink()
    assert main(["run", CONFIG, *SHORT]) == 2
    err = capfd.readouterr().err
    assert "does not say which run this is" in err
    advised = shlex.split(err.rpartition("For example: ")[2])
    assert advised == ["mv", "runs/quick/checkpoints/8", "runs/quick-8"]
    assert main(["ckpt", "verify", "quick"]) == 70
    assert "does not say which run this is" in capfd.readouterr().out
    Path(advised[1]).rename(advised[2])
    assert kept(again()) == whole


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
    assert main(on) == 0
    log = Path("runs/copy/log.txt").read_text()
    assert "runs/copy was copied or moved from runs/quick: it is a separate run from now on" in log
    assert f"another run ({original} after the copy)" not in log, "the copy was made before step 12"
    copy = said(Path("runs/copy"))
    assert copy["id"] != original
    assert copy["ancestors"] == {original: 12}
    assert said()["id"] == original
    (Path("runs/copy/run.json")).unlink()
    owner = find_owner(Path("runs/copy"))
    assert owner is not None
    assert (owner.run, dict(owner.ancestors)) == (copy["id"], copy["ancestors"])


@thorough
def test_what_the_original_saves_after_the_copy_is_foreign_to_the_copy(whole):
    shutil.copytree(RUN, "runs/copy")
    settings = (*SHORT, "name=copy")
    with pytest.raises(PowerCutError):
        trained(CONFIG, *settings, hooks=[cut_at(10)])  # it has become a run of its own
    again()
    shutil.copytree(CHECKPOINTS / "12", "runs/copy/checkpoints/12")
    outcome = trained(CONFIG, *settings)
    log = outcome.directory.log.read_text()
    assert f"is a checkpoint of another run ({said()['id']} after the copy), and this run" in log
    assert "resumes from step 8 of 12" in log
    assert kept(outcome) == whole


def test_a_run_that_was_renamed_resumes_under_its_new_name(whole):
    RUN.rename("runs/other")
    outcome = trained(CONFIG, *SHORT, "name=other")
    assert "resumes from step 8 of 12" in outcome.directory.log.read_text()
    assert kept(outcome) == whole


def test_a_copy_without_run_json_is_no_new_run_of_the_original(capfd):
    shutil.copytree(RUN, "runs/copy")
    Path("runs/copy/run.json").unlink()
    assert main(["run", "runs/copy/config.yaml"]) == 2
    assert "belongs to a run named quick" in capfd.readouterr().err


def test_an_id_is_hidden_nowhere(tmp_path: Path):
    """Check that an id is not taken for a secret, since random-looking text is redacted."""
    assert "redacted" not in json.dumps(said())
    assert read_record(RUN / "run.json").trouble == ""


def test_jt_run_in_a_directory_of_its_own_is_refused_with_the_call():
    config = config_of(CONFIG, SHORT)
    with pytest.raises(PowerCutError):
        jt.run(config, directory=Path("mine"), hooks=[cut_at(10)])
    with pytest.raises(
        ConfigError, match=r"the same call of jt\.run again, with the values of that"
    ):
        jt.run(config_of(CONFIG, (*SHORT, "seed=1")), directory=Path("mine"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "log.txt"])
def test_a_file_that_may_not_be_read_or_written_is_told(name: str, capfd):
    (RUN / name).chmod(0)
    with permissions_hold():
        assert main(["run", CONFIG, *SHORT]) == 2
    err = capfd.readouterr().err
    assert f"{RUN / name} is a file of the run, and you have no permission" in err
    assert f"chmod u+rw {RUN / name}" in err


def test_a_run_on_a_disk_mounted_read_only_is_not_to_be_moved(monkeypatch, capfd):
    def refuse(path, mode):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(run_dir, "open_regular", refuse)
    assert main(["run", CONFIG, *SHORT]) == 2
    err = capfd.readouterr().err
    assert "config.yaml cannot be written (Read-only file system). The file system is" in err
    assert "Move it away" not in err


@pytest.mark.parametrize("name", ["seal.json", "about.json", "checkpoints", "/8"])
def test_a_checkpoint_that_cannot_be_read_now_is_resumed_from_later(
    name, monkeypatch, capfd, whole
):
    rows = (RUN / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(transient, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        Disk(patch, name, errno.ESTALE, times=math.inf)
        assert main(["run", CONFIG, *SHORT]) == FAULT
    assert "mv " not in capfd.readouterr().err
    assert layout.list_named_steps(CHECKPOINTS) == [4, 8]
    assert (RUN / "metrics.jsonl").read_bytes() == rows
    if name == "seal.json":
        assert kept(again()) == whole


def test_a_share_that_goes_away_while_a_run_starts_begins_no_new_run(monkeypatch):
    away = lambda self: RUN.rename("share")
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "check_files", away)
        assert main(["run", CONFIG, *SHORT]) == FAULT
    assert not RUN.exists()
    Path("share").rename(RUN)
    assert layout.list_named_steps(CHECKPOINTS) == [4, 8]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("name", ["run.json", "quick/config.yaml", "metrics.jsonl", "steps.jsonl"])
def test_a_file_of_the_run_that_cannot_be_read_now_ends_it_with_a_fault(
    name, number, monkeypatch, capfd
):
    shutil.rmtree(CHECKPOINTS)  # so that config.yaml is read
    monkeypatch.setattr(transient, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        Disk(patch, name, number, times=math.inf)
        assert main(["run", CONFIG, *SHORT]) == FAULT
    err = capfd.readouterr().err
    assert os.strerror(number) in err
    assert "mv " not in err
    assert "Traceback" not in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (lambda step: (shutil.rmtree(step), step.mkdir()), "is empty: all its files are missing"),
        (
            lambda step: step.rename(step.with_name("8.bak")),
            "is in {home} under the name 8.bak",
        ),
        (shutil.rmtree, "checkpoint 8, which runs/quick/run.json names, is missing"),
    ],
    ids=["emptied", "renamed", "removed"],
)
def test_a_step_that_is_not_there_any_more_is_said_by_verify_and_by_the_run(hurt, words, capfd):
    hurt(CHECKPOINTS / "8")
    assert main(["ckpt", "verify", "quick"]) == 70
    out = capfd.readouterr().out
    assert "4  valid" in out
    assert ("8  DAMAGED" in out) or ("8.bak holds checkpoint 8" in out) or ("8 is missing" in out)
    log = again().directory.log.read_text()
    assert words.format(home=CHECKPOINTS.absolute()) in log
    assert "resumes from step 4 of 12" in log


@thorough
def test_a_sample_that_cannot_be_written_is_told_and_the_run_is_done():
    study = Path("experiments/quick.py")
    sample = "sample=lambda params, extra, key: 'a poem',\n            valid="
    study.write_text(study.read_text().replace("valid=InOrder", f"{sample}InOrder"))
    made = lambda step, state: Path("runs/other/samples.txt").mkdir() if step == 4 else None
    outcome = trained(CONFIG, *SHORT, "name=other", "steps=8", hooks=[made])
    assert (outcome.status, outcome.sample) == ("done", "a poem")
    log = outcome.directory.log.read_text()
    assert "the sample could not be written to runs/other/samples.txt (is a directory, and" in log
    assert main(["report", "other"]) == 0
