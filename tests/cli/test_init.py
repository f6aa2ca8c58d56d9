"""`jtrain init`: a project of one's own that runs, passes its test, and is written nowhere else."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.config.resolve import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def python(*words: str, cwd: str) -> str:
    """Run Python as in a terminal and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_config_is_valid_and_every_file_has_its_name(capsys):
    assert main(["init", "rings"]) == 0
    out = capsys.readouterr().out
    written = {path for path in Path("rings").rglob("*") if path.is_file()}
    assert {Path("rings/experiments/rings.py"), Path("rings/tests/test_rings.py")} <= written
    for path in written:
        assert str(path) in out
        assert "@NAME@" not in path.read_text()
    resolved = resolve("rings/configs/rings.yaml")
    assert resolved.schema.__module__ == "experiments.rings"
    assert (resolved.config.name, resolved.config.data.rows) == ("rings", 5000)


def test_an_empty_folder_is_filled_also_under_git_and_under_another_name():
    Path("2027-01", ".git").mkdir(parents=True)
    assert main(["init", "2027-01", "--name", "rings"]) == 0
    assert resolve("2027-01/configs/rings.yaml").config.name == "rings"


@pytest.mark.thorough
def test_it_trains_and_passes_its_own_test():
    assert main(["init", "rings"]) == 0
    out = python("-W", "error", "-m", "jtrain", "run", "configs/rings.yaml", cwd="rings")
    accuracy = float(out.split("accuracy ")[1].split()[0])
    assert accuracy > 0.95
    assert "2 passed" in python("-m", "pytest", "-q", "-W", "error", cwd="rings")


@pytest.mark.thorough
def test_a_loss_of_the_project_is_one_result():
    assert main(["init", "rings"]) == 0
    python("-m", "jtrain", "check", "configs/rings.yaml", cwd="rings")


@pytest.mark.thorough
def test_its_files_are_formatted_and_have_no_lint():
    pytest.importorskip("ruff", reason="pip install -e '.[dev]'")
    assert main(["init", "rings"]) == 0
    alone = ["--isolated", "--no-cache", "--line-length", "100"]
    python("-m", "ruff", "format", "--check", *alone, ".", cwd="rings")
    python("-m", "ruff", "check", "--select", "E,F,W,B,I,UP,RUF,PT,SIM", *alone, ".", cwd="rings")


@pytest.mark.parametrize(
    ("words", "says", "mend"),
    [
        (["my-study"], "would be named my-study, which is no name", "my-study --name my_study"),
        (["class"], "would be named class, which is no name", "class --name my_class"),
        (["new", "--name", "2x"], "would be named 2x, which is no name", "new --name my_2x"),
        (["digits"], "named digits, which is taken", "digits --name my_digits"),
        (["experiments"], "which is taken", "experiments --name my_experiments"),
        (["full"], "full must be new or empty, and it has a.txt", "full_2 --name full"),
        (["full/a.txt", "--name", "a"], "and it is a file", "full/a.txt_2 --name a"),
        (["full-2"], "would be named full-2", "full-2_2 --name full_2"),
        (["."], "must be new or empty, and it has full, full-2", "project --name"),
    ],
)
def test_a_mistake_is_reported_and_its_advice_works(words: list[str], says: str, mend: str, capsys):
    for name in ("full", "full-2"):
        Path(name).mkdir()
        Path(name, "a.txt").write_text("")
    here = Path("study").resolve()  # the name of a temporary folder is not known
    if words == ["."]:
        here.mkdir()
        for name in ("full", "full-2"):
            Path(name).rename(here / name)
        os.chdir(here)
    assert main(["init", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert f"write jtrain init {mend}" in err
    _, *advised = shlex.split(err.split("; write ")[1])
    assert main(advised) == 0


def test_a_folder_that_cannot_be_made_is_reported(capsys):
    Path("file").write_text("")
    assert main(["init", "file/study"]) == 2
    assert "file/study" in (err := capsys.readouterr().err)
    assert "cannot be written (Not a directory); name a folder" in err


def test_a_folder_of_an_object_store_is_refused(capsys):
    assert main(["init", "s3://bucket/study"]) == 2
    assert "DIR" in capsys.readouterr().err
    assert not Path("s3:").exists()
