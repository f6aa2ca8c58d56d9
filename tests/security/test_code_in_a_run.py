"""Code that lies in a run is never run, and no terminal obeys its texts, whatever verb reads it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_study import CODE, YAML, at_home, trained, write_study

import jtrain as jt
from jtrain.cli import VERBS, main
from jtrain.config.lookup import find_experiment
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError
from jtrain.train.hooks.log import LogLines
from jtrain.train.run_dir import get_environment

MODULES = ["__init__", "__main__", "sitecustomize", "usercustomize", "conftest", "setup", "numpy", "jax", "jaxlib", "typing", "difflib", "yaml", "orbax", "optax", "experiments/__init__", "experiments/quick", "experiments/fit", "checkpoints/__init__"]  # fmt: skip # noqa: E501
RUN, CONFIG = "runs/quick", "runs/quick/config.yaml"
WORDS: dict[str, list[str]] = {
    "doctor": ["--only", "packages"],
    "init": ["another"],
    "run": [CONFIG],
    "eval": [RUN],
    "predict": [RUN, "rows.npz", "--out", "out.npz"],
    "sample": [RUN, "--prompt", "a"],
    "show": [CONFIG],
    "check": [CONFIG, "--quick"],
    "explain": [CONFIG, "parallel.kind=none"],  # refused once the experiment is imported
    "plan": [CONFIG, "--devices", "none"],
    "range": [CONFIG, "parallel.kind=none"],
    "replay": [RUN, "--step", "9"],
    "diff": [RUN, RUN],
    "ckpt": ["ls", RUN],
    "export": [RUN, "--to", "safetensors", "--out", "out"],
    "data": ["show", CONFIG],
    "sweep": [CONFIG, "seed=1", "parallel.kind=none"],
    "work": [RUN],
    "launch": ["--processes", "0", "run", CONFIG],
    "report": [RUN],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[Path]:
    """Create a study with a run of two steps, whose directory holds code that leaves a trace."""
    home = tmp_path_factory.mktemp("home")
    write_study(home)
    with pytest.MonkeyPatch.context() as patch:
        at_home(home, patch, compiled)
        trained("configs/quick.yaml", "steps=2", "checkpoint.every=1")
        plant(home / RUN)
        yield home


def plant(run: Path) -> None:
    for folder in (run, run / "sub", run.parent):
        for name in MODULES:
            file = folder / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"open({str(run / 'OWNED')!r}, 'a').write(__name__)\n{CODE}")


@pytest.fixture(autouse=True)
def nothing_ran(home: Path) -> Iterator[None]:
    owned = home / RUN / "OWNED"
    owned.unlink(missing_ok=True)
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        del sys.modules[name]
    yield
    assert not owned.exists(), owned.read_text()


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_code_of_a_run(verb: str, home: Path, monkeypatch):
    monkeypatch.chdir(home)
    assert main([verb, *WORDS[verb]]) in {0, 1, 2, 70}


@pytest.mark.parametrize("where", [".", RUN, f"{RUN}/sub", "runs"])
def test_the_experiment_of_a_run_is_the_users_own(where: str, home: Path, monkeypatch):
    monkeypatch.chdir(home / where)
    for config in (home / CONFIG, os.path.relpath(home / CONFIG)):
        assert find_experiment("quick", Path(config)).where == home / "experiments" / "quick.py"
        assert type(jt.load(Path(config).parent).config).__module__ == "experiments.quick"


def test_a_foreign_run_finds_the_experiment_of_the_current_directory(
    home: Path, tmp_path: Path, monkeypatch
):
    """A run beside which a stranger's `experiments` lies too."""
    shutil.copytree(home / RUN, tmp_path / "theirs")
    shutil.copytree(home / RUN / "experiments", tmp_path / "experiments")
    config = tmp_path / "theirs" / "config.yaml"
    monkeypatch.chdir(home)
    assert find_experiment("quick", config).where == home / "experiments" / "quick.py"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["eval", str(config.parent)]) == 2
    with pytest.raises(ConfigError, match=r"no code is run\. If you trust it: mkdir -p") as caught:
        resolve(config)
    advice = str(caught.value).partition("If you trust it: ")[2].splitlines()[0]
    subprocess.run(advice, shell=True, check=True)
    assert Path("experiments/quick.py").read_text() == (
        (tmp_path / "experiments/quick.py").read_text()
    )


def test_a_run_without_its_record_is_a_run_or_none(home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(home)
    for lost in ("run.json", "metrics.jsonl", "checkpoints"):
        run = tmp_path / "theirs"
        shutil.copytree(home / RUN, run, dirs_exist_ok=True)
        (shutil.rmtree if lost == "checkpoints" else os.unlink)(run / lost)
        assert main(["eval", str(run)]) in {0, 2}
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    for lost in ("run.json", "metrics.jsonl"):
        (run / lost).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="is no directory of a run"):
        jt.load(run)


def test_a_study_below_a_folder_runs_has_its_own_experiments(tmp_path: Path, monkeypatch):
    """`/data/runs/me/study` is no run."""
    study = tmp_path / "runs" / "me" / "study"
    config = write_study(study, config=YAML)
    monkeypatch.chdir(study)
    assert find_experiment("quick", config).where == study / "experiments" / "quick.py"


CHILD = ["-P", "-c", "from jtrain.distributed.compiler_flags import check_known as f; import jtrain.__main__ as m; m.main = lambda: f({'XLA_FLAGS': ''}); m.begin()"]  # fmt: skip # noqa: E501


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("", ["-m", "jtrain", "show", "config.yaml"]),
        ("sub", ["-m", "jtrain", "doctor", "--only", "packages"]),
        ("..", ["-m", "jtrain", "--version"]),
        ("", CHILD),  # as the installed command, whose search path has its own folder
    ],
)
def test_within_a_run_nothing_beside_is_imported(where: str, words: list[str], home: Path):
    """Neither here nor in the processes that a command starts."""
    env = {**os.environ, "PYTHONPATH": str(Path(jt.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=home / RUN / where,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in {0, 2, 70}


def test_programs_that_a_repository_in_a_run_names_are_not_run(home: Path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "."], ["add", "metrics.jsonl"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], cwd=home / RUN, check=True)
    spy = home / RUN / "spy"
    spy.write_text(f"#!/bin/sh\ntouch {home / RUN / 'OWNED'}\n")
    spy.chmod(0o755)
    subprocess.run([*git, "config", "core.fsmonitor", str(spy)], cwd=home / RUN, check=True)
    monkeypatch.chdir(home / RUN / "sub")
    assert get_environment([])["git"] == ""


ESCAPES = "\x1b]52;c;AAAA\x07\x1b[6n\x9b5n\x90q\x1b\\\r"


@pytest.fixture
def escaping(home: Path, tmp_path: Path, monkeypatch) -> Path:
    """Create a study with a run whose texts all hold escape sequences."""
    shutil.copytree(home, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    run = Path(RUN)
    facts = json.loads((run / "run.json").read_text())
    texts = {
        key: f"{ESCAPES}{key}" for key in ("status", "why", "data", "tokenizer", "git", "argv")
    }
    devices = {"devices": [ESCAPES], "packages": {ESCAPES: ESCAPES}}
    (run / "run.json").write_text(json.dumps(facts | texts | devices))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("metrics.jsonl", "steps.jsonl", "speed.jsonl", "leaves.jsonl", "events.jsonl"):
        row = {ESCAPES: 1.0, f"{ESCAPES}/loss": 2.0, "event": ESCAPES, "message": ESCAPES}
        (run / name).write_text("".join(json.dumps(x | row) + "\n" for x in rows) + ESCAPES)
    for step in (run / "checkpoints").glob("[0-9]"):
        about = step / "about.json"
        about.write_text(
            about.read_text().replace('"step"', json.dumps(ESCAPES) + ': 1, "step"', 1)
        )
    (run / "checkpoints" / f"3{ESCAPES}").mkdir()
    (run / "log.txt").write_text(ESCAPES)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{config}{json.dumps(ESCAPES)}: {json.dumps(ESCAPES)}\n")
    return run


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_prints_escape_sequences_of_a_run(verb: str, escaping: Path, capfd):
    extra = {"ckpt": ["verify", RUN], "show": ["quick", "--ledger"]}
    main([verb, *extra.get(verb, WORDS[verb])])
    for text in capfd.readouterr():
        assert not [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]


def test_a_log_and_the_screen_spell_control_characters(tmp_path: Path):
    shown = []
    LogLines(tmp_path / "log.txt", screen=shown.append).print(f"a{ESCAPES}\tb\nc")
    text = "a\\x1b]52;c;AAAA\\x07\\x1b[6n\\x9b5n\\x90q\\x1b\\\\r\tb\nc"
    assert shown == [text]
    assert (tmp_path / "log.txt").read_text() == f"{text}\n"


def test_all_that_verbs_print_goes_through_one_function():
    for file in (Path(jt.__file__).parent / "cli").glob("*.py"):
        text = file.read_text()
        if re.search(r"\bprint\(", text) and file.name != "output.py":
            assert "from jtrain.cli.output import print_text as print" in text, file
