"""A foreign run: none of its code runs, no link in it is followed, no terminal obeys its texts."""

# ruff: noqa: E501  (a list reads best on a line)

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import watched
from plain_environ import SAID
from quick_study import CODE, YAML, at_home, trained, write_study

import jtrain as jt
from jtrain.checkpoint import layout
from jtrain.cli import VERBS, main
from jtrain.config.lookup import find_experiment
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError
from jtrain.io.log import LOG, RunLog
from jtrain.io.regular_files import LinkError, open_regular, read_bytes
from jtrain.train.run_dir import get_environment

MODULES = ["__init__", "__main__", "sitecustomize", "usercustomize", "conftest", "setup", "numpy", "jax", "jaxlib", "typing", "difflib", "yaml", "orbax", "optax", "experiments/__init__", "experiments/quick", "experiments/fit", "checkpoints/__init__"]  # fmt: skip
RUN, CONFIG = "runs/quick", "runs/quick/config.yaml"
WORDS: dict[str, list[str]] = {
    "doctor": ["--only", "packages"], "init": ["another"], "run": [CONFIG], "eval": [RUN],
    "predict": [RUN, "rows.npz", "--out", "out.npz"], "sample": [RUN, "--prompt", "a"],
    "show": [CONFIG], "check": [CONFIG, "--quick"], "museum": ["soup"],
    "explain": [CONFIG, "parallel.kind=none"],  # refused once the experiment is imported
    "plan": [CONFIG, "--devices", "none"], "range": [CONFIG, "parallel.kind=none"],
    "replay": [RUN, "--step", "9"], "audit": [RUN], "diff": [RUN, RUN], "ckpt": ["ls", RUN],
    "export": [RUN, "--to", "safetensors", "--out", "out"], "eject": [CONFIG, "-o", "out.py"], "data": ["show", CONFIG],
    "sweep": [CONFIG, "seed=1", "parallel.kind=none"], "work": [RUN],
    "launch": ["--processes", "0", "run", CONFIG], "report": [RUN],
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[Path]:
    """Create a study with a run of two steps and a copy of it."""
    study = tmp_path_factory.mktemp("study")
    write_study(study)
    with pytest.MonkeyPatch.context() as patch:
        at_home(study, patch, compiled)
        trained("configs/quick.yaml", "steps=2", "log.every=1", "checkpoint.every=1")
        shutil.copytree("runs/quick", "runs/other")
        yield study


@pytest.fixture(scope="module")
def home(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the study, and plant code that leaves a trace in the run."""
    home = tmp_path_factory.mktemp("home") / "study"
    shutil.copytree(study, home)
    plant(home / RUN)
    return home


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


@pytest.mark.thorough
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_code_of_a_run(verb: str, home: Path, monkeypatch):
    monkeypatch.chdir(home)
    assert main([verb, *WORDS[verb]]) in {0, 1, 2, 70}


@pytest.mark.thorough
@pytest.mark.parametrize("where", [".", RUN, f"{RUN}/sub", "runs"])
def test_the_experiment_of_a_run_is_the_users_own(where: str, home: Path, monkeypatch):
    monkeypatch.chdir(home / where)
    for config in (home / CONFIG, os.path.relpath(home / CONFIG)):
        assert find_experiment("quick", Path(config)).where == home / "experiments" / "quick.py"
        assert type(jt.load(Path(config).parent).config).__module__ == "experiments.quick"


@pytest.mark.thorough
def test_a_foreign_run_finds_the_experiment_of_the_current_directory(home, tmp_path, monkeypatch):
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
    theirs = (tmp_path / "experiments/quick.py").read_text()
    assert Path("experiments/quick.py").read_text() == theirs


def test_a_study_below_a_folder_runs_has_its_own_experiments(tmp_path: Path, monkeypatch):
    study = tmp_path / "runs" / "me" / "study"
    config = write_study(study, config=YAML)
    monkeypatch.chdir(study)
    assert find_experiment("quick", config).where == study / "experiments" / "quick.py"


CHILD = ["-P", "-c", "from jtrain.distributed.compiler_flags import check_known as f; import jtrain.__main__ as m; m.main = lambda: f({'XLA_FLAGS': ''}); m.begin()"]  # fmt: skip


@pytest.mark.thorough
# The second as the installed command, whose search path has its own folder.
@pytest.mark.parametrize("words", [["-m", "jtrain", "show", "config.yaml"], CHILD])
def test_within_a_run_nothing_beside_is_imported(words: list[str], home: Path):
    """Neither here nor in the processes that a command starts."""
    env = {**os.environ, "PYTHONPATH": str(Path(jt.__file__).parents[1])}
    done = subprocess.run([sys.executable, *words], cwd=home / RUN, env=env, **SAID)
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
    texts = {k: f"{ESCAPES}{k}" for k in ("status", "why", "data", "tokenizer", "git", "argv")}
    devices = {"devices": [ESCAPES], "packages": {ESCAPES: ESCAPES}}
    (run / "run.json").write_text(json.dumps(facts | texts | devices))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("metrics.jsonl", "steps.jsonl", "speed.jsonl", "events.jsonl"):
        row = {ESCAPES: 1.0, f"{ESCAPES}/loss": 2.0, "event": ESCAPES, "message": ESCAPES}
        (run / name).write_text("".join(json.dumps(x | row) + "\n" for x in rows) + ESCAPES)
    for step in (run / "checkpoints").glob("[0-9]"):
        about = step / "about.json"
        said = about.read_text().replace('"step"', json.dumps(ESCAPES) + ': 1, "step"', 1)
        about.write_text(said)
    (run / "checkpoints" / f"3{ESCAPES}").mkdir()
    (run / "log.txt").write_text(ESCAPES)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{config}{json.dumps(ESCAPES)}: {json.dumps(ESCAPES)}\n")
    return run


@pytest.mark.thorough
def test_no_verb_prints_escape_sequences_of_a_run(escaping: Path, capfd):
    extra = {"ckpt": ["verify", RUN], "show": ["quick", "--ledger"]}
    for verb in VERBS:
        main([verb, *extra.get(verb, WORDS[verb])])
        for text in capfd.readouterr():
            wrong = [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
            assert not wrong, verb


def test_a_log_and_the_screen_spell_control_characters(tmp_path: Path, capsys):
    with RunLog() as run:
        run.open(tmp_path / "log.txt")
        LOG.info(f"a{ESCAPES}\tb\nc")
    text = "a\\x1b]52;c;AAAA\\x07\\x1b[6n\\x9b5n\\x90q\\x1b\\\\r\tb\nc"
    assert capsys.readouterr().out == f"{text}\n"
    assert (tmp_path / "log.txt").read_text() == f"{text}\n"


def test_all_that_verbs_print_goes_through_one_function():
    for file in (Path(jt.__file__).parent / "cli").glob("*.py"):
        text = file.read_text()
        if re.search(r"\bprint\(", text) and file.name != "output.py":
            assert "from jtrain.cli.output import print_text as print" in text, file


SECRET = b'{"step": 3, "loss": "THE-READERS-OWN"}\n'
PNG = b"\x89PNG\r\n\x1a\n" + SECRET
FILES = ["config.yaml", "run.json", "metrics.jsonl", "speed.jsonl", "steps.jsonl", "events.jsonl", "profile.json", "log.txt", "samples.txt", "pictures/a-3.png", "checkpoints/.writer", "checkpoints/2/about.json", "checkpoints/2/seal.json", "checkpoints/2/state/_METADATA", "checkpoints/2.bak"]  # fmt: skip
EVERYBODYS = ("config.yaml", "run.json", "checkpoints/2")
FOLDERS = ["checkpoints", "checkpoints/2", "checkpoints/2/state", "pictures"]
READERS = [
    ["report", "runs/quick"], ["ckpt", "verify", "quick"], ["diff", "runs/quick", "runs/other"],
    ["eval", "quick"], ["replay", "quick"], ["ckpt", "ls", "quick"],
    ["ckpt", "show", "quick", "--step", "2"], ["ckpt", "diff", "quick", "other"],
    ["ckpt", "export", "quick", "--step", "2", "--out", "out.safetensors"],
    ["ckpt", "rm", "quick", "--damaged"],
    ["run", "configs/quick.yaml", "steps=1", "name=new", "init_from.path=runs/quick"],
]  # fmt: skip


@pytest.fixture
def outside(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a private folder of the reader, with a copy of the study."""
    shutil.copytree(study, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    outside = tmp_path / "outside"
    shutil.copytree("runs/quick", outside)
    (outside / "secret").write_bytes(SECRET)
    (outside / "a-3.png").write_bytes(PNG)
    return outside


def link(name: str, outside: Path) -> None:
    """Replace a file or folder of the run by a link out of it."""
    path = Path("runs/quick") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    target = outside / ("a-3.png" if name.endswith(".png") else "secret")
    if name in FOLDERS:
        target = outside / name if (outside / name).is_dir() else outside
        for file in [each for each in target.rglob("*") if each.is_file()]:
            if file.name == "about.json":
                file.write_bytes(file.read_bytes().replace(b'"step"', b'"THE-READERS-OWN"'))
    path.symlink_to(target)


def cases() -> Iterator[object]:
    """Yield each name with some readers, by default those that open each file of a run."""
    for name in FILES + FOLDERS:
        yield pytest.param(name, READERS[:2], id=name)
        mark = pytest.mark.thorough if name in EVERYBODYS else pytest.mark.slow
        yield pytest.param(name, READERS[2:], id=f"{name}, other readers", marks=mark)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "readers"), list(cases()))
def test_no_reader_of_a_run_follows_its_links(name, readers, outside, capfd):
    link(name, outside)
    for words in readers:
        check_reader(words, outside, capfd)


def check_reader(words: list[str], outside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path for path in Path.cwd().rglob("*")}
    with watched(everywhere=True) as events:
        code = main(words)
    assert code in (0, 1, 2, 70)
    opened = [
        event
        for event in events
        if event.name in ("open", "os.listdir", "os.scandir")
        and not (event.name == "open" and event.args[2] & os.O_NOFOLLOW)
        and isinstance(event.args[0], str | bytes | os.PathLike)
        # The lock has an opener with O_NOFOLLOW, which has an event of its own.
        and not (event.args[1:2] == ("r+",) and str(event.args[0]).endswith(".writer"))
        and Path(os.fsdecode(event.args[0])).resolve().is_relative_to(outside)
    ]
    assert opened == []
    assert (outside / "secret").read_bytes() == SECRET
    said = "".join(capfd.readouterr())
    assert "THE-READERS-OWN" not in said
    assert "Traceback" not in said
    for path in {*Path.cwd().rglob("*")} - before:
        if path.is_file() and not path.is_symlink():
            assert b"THE-READERS-OWN" not in path.read_bytes(), path


def test_the_report_names_the_skipped_file(outside: Path, capsys: pytest.CaptureFixture[str]):
    names = ["log.txt", "run.json", "metrics.jsonl", "config.yaml", "pictures"]
    for name in names:
        link(name, outside)
    assert main(["report", "quick"]) == 0
    for text in (capsys.readouterr().err, Path("runs/quick/report.html").read_text()):
        missing = [n for n in names if not re.search(rf"{n}:?[^\n]* is a link to ", text)]
        assert missing == []


def test_a_linked_step_is_damaged_and_is_not_read(outside: Path, capsys):
    link("checkpoints/2", outside)
    assert layout.list_steps(Path("runs/quick/checkpoints")) == [1]
    assert main(["ckpt", "verify", "quick"]) == 70
    assert f"is a link to {outside / 'checkpoints' / '2'}" in capsys.readouterr().out
    assert main(["ckpt", "show", "runs/quick/checkpoints/2"]) != 0
    assert "is a link to" in capsys.readouterr().err


def test_linked_checkpoints_are_read_only_by_their_real_path(outside: Path, capsys):
    link("checkpoints", outside)
    assert main(["ckpt", "ls", "quick"]) == 2
    assert "name their real path; otherwise remove the link: rm " in capsys.readouterr().err
    assert main(["ckpt", "ls", str(outside / "checkpoints")]) == 0


def test_a_file_inside_is_opened_without_following_links(tmp_path: Path):
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "sub" / "file").write_bytes(b"inside")
    (tmp_path / "file").write_bytes(b"outside")
    assert read_bytes(run / "sub" / "file", most=9, inside=run) == b"inside"
    (run / "link").symlink_to("sub/file")
    (run / "folder").symlink_to(tmp_path)
    (run / "sub" / "up").symlink_to("../..")
    for path in ("link", "folder/file", "sub/up/file"):
        with pytest.raises(LinkError, match=r"is a link to .*, which is not followed"):
            read_bytes(run / path, most=9, inside=run)
    with pytest.raises(FileNotFoundError):
        read_bytes(run / "none", most=9, inside=run)
    with pytest.raises(NotADirectoryError):
        read_bytes(run / "sub" / "file" / "x", most=9, inside=run)
    with pytest.raises(IsADirectoryError):
        read_bytes(run / "sub", most=9, inside=run)
    (tmp_path / "way").symlink_to(run)  # the path to the run itself may be a link
    assert read_bytes(tmp_path / "way" / "sub" / "file", most=9, inside=tmp_path / "way")
    with open_regular(run / "new", "ab", inside=run) as file:
        file.write(b"x")
    assert (run / "new").read_bytes() == b"x"
