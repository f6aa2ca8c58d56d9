"""`jtrain init`: a project of one's own that runs, passes its test, and is written nowhere else."""

import os
import shlex
from pathlib import Path

import pytest
from plain_environ import run_python

from jtrain.cli import main
from jtrain.config.resolve import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def python(*words: str, cwd: str) -> str:
    """Run Python as in a terminal and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return run_python(*words, cwd=cwd, env=env | {"PYTHONPATH": str(ROOT)}).stdout


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
def test_it_trains_passes_its_own_test_and_its_loss_is_one_result():
    assert main(["init", "rings"]) == 0
    out = python("-W", "error", "-m", "jtrain", "run", "configs/rings.yaml", cwd="rings")
    accuracy = float(out.split("accuracy ")[1].split()[0])
    assert accuracy > 0.95
    assert "2 passed" in python("-m", "pytest", "-q", "-W", "error", cwd="rings")
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
        (["my-study"], "would be named my-study, which is not a name", "my-study --name my_study"),
        (["digits"], "named digits, which is taken", "digits --name my_digits"),
        (["full"], "full must be a new or an empty folder", "full_2 --name full"),
    ],
)
def test_a_mistake_is_reported_and_its_advice_works(words: list[str], says: str, mend: str, capsys):
    Path("full").mkdir()
    Path("full", "a.txt").write_text("")
    assert main(["init", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert f"write jtrain init {mend}" in err
    _, *advised = shlex.split(err.split("; write ")[1])
    assert main(advised) == 0
