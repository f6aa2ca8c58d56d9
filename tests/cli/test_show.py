"""`jtrain show` prints the values of a run, and the command line keeps its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML
from toy_study import write_study

from jtrain import cli
from jtrain.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "configs/toy.yaml"


def test_each_value_is_on_a_line_with_its_origin(path: str, capsys):
    assert main(["show", path, "model.title=a b: c", "batch=8"]) == 2  # two colons
    capsys.readouterr()
    assert main(["show", path, "model.title='a b: c'", "batch=8"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert cells["steps"] == ["10", "configs/toy.yaml:2"]
    assert cells["batch"] == ["8", "command line"]
    assert cells["model.title"] == ['"a b: c"', "command line"]
    assert cells["optimizer.lr"] == ["0.001", "default"]
    assert list(cells)[:4] == ["experiment", "name", "seed", "steps"]


def test_a_key_alone_prints_its_value_and_its_help(path: str, capsys):
    assert main(["show", path, "optimizer.lr", "optimizer.lr=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("optimizer.lr  3.0  command line\n\noptimizer.lr (sgd): a number above 0")
    assert "Learning rate." in out


def test_json_is_one_object(path: str, capsys):
    assert main(["show", path, "--json", "optimizer.kind=sgd", "optimizer.lr=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == path
    assert len(found["notes"]) == 1
    assert found["values"]["optimizer.lr"] == {"value": 1.0, "origin": "command line"}
    assert main(["show", path, "checkpoint", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    names = ("every", "grace", "keep", "keep_every", "best", "store", "on_damage")
    assert list(values) == [f"checkpoint.{name}" for name in names]


@pytest.mark.sampled(26)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_editor_accepts_each_config_by_its_schema(path: Path, capsys):
    assert main(["show", str(path), "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    config = YAML(typ="safe").load(path)
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError, match="stepps"):
        jsonschema.validate({**config, "stepps": 3}, schema)


def test_the_schema_is_that_of_the_experiment_or_of_every_config(path: str, capsys):
    assert main(["show", path, "--schema"]) == 0
    assert "optimizer" in json.loads(capsys.readouterr().out)["properties"]
    assert main(["show", "--schema"]) == 0
    properties = json.loads(capsys.readouterr().out)["properties"]
    assert {"base", "experiment", "steps"} <= properties.keys()


def test_every_verb_explains_itself(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in cli.VERBS)
    assert main(["show", "--help"]) == 0
    assert "--schema" in capsys.readouterr().out


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (RuntimeError, 70)])
def test_each_error_has_its_exit_code(raised, code: int, monkeypatch, capsys):
    from jtrain.cli import show

    def fail(argv):
        raise raised("on the way")

    monkeypatch.setattr(show, "main", fail)
    assert main(["show"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 70)


@pytest.mark.thorough
def test_a_closed_pipe_is_not_a_fault(path: str):
    command = (
        f"{sys.executable} -m jtrain show {path} --schema | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout.split()[-1] in {"0", "141"}


def test_the_cluster_is_printed_with_its_variables(path: str, monkeypatch, capsys):
    assert main(["show", path, "--cluster"]) == 0
    out = capsys.readouterr().out
    assert "process      0 of 1, trains" in out
    assert "no variable of a cluster is set" in out
    for name, value in {"COORDINATOR": "127.0.0.1:4000", "PROCESSES": "2", "PROCESS": "1"}.items():
        monkeypatch.setenv(f"JTRAIN_{name}", value)
    assert main(["show", path, "--cluster"]) == 0
    out = capsys.readouterr().out
    assert "process      1 of 2, trains" in out
    assert "JTRAIN_COORDINATOR=127.0.0.1:4000" in out
    assert main(["show", path, "--cluster", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["index"], found["processes"], found["coordinator"]) == (1, 2, "127.0.0.1:4000")


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("jtrain run configs/dig", ["configs/digits.yaml "]),
        ("jtrain run digits optimizer.l", ["optimizer.lr="]),
        ("jtrain check digits parallel.kind=fs", ["parallel.kind=fsdp "]),
        ("jtrain launch --processes 2 ru", ["run "]),
        ("jtrain run no.yaml key", []),
    ],
)
@pytest.mark.thorough
def test_the_words_that_may_follow(line: str, some: list[str]):
    """Ask as argcomplete's script for bash does: the answer comes through descriptor 8."""
    pytest.importorskip("argcomplete")
    given = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    env = {**os.environ, **given, "_ARGCOMPLETE_IFS": "\n", "PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()
    script = f'exec 8>&{write}; exec "$0" -m jtrain'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], cwd=ROOT, env=env, pass_fds=[write], timeout=300
    )
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read().split("\n") == (some or [""])
    assert done.returncode == 0
