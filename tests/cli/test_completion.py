"""`jtrain completion`: what each shell completes, in real shells where there are any."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.cli import VERBS, main
from jtrain.cli.completion import SCRIPTS, complete

ROOT = Path(__file__).parents[2]
ASK = {
    "bash": """
        eval "$(jtrain completion bash)"
        COMP_LINE=$LINE COMP_POINT=${#LINE}
        compopt() { :; }
        _jtrain
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "fish": 'jtrain completion fish | source; complete --do-complete "$LINE"',
    "zsh": """
        compdef() { :; }
        compadd() { while [[ $1 != -- ]] { shift }; shift; (( $# )) && print -l -- $@; return 0 }
        eval "$(jtrain completion zsh)"
        words=("${(@s: :)LINE}") CURRENT=${#words} PREFIX=${words[-1]}
        _jtrain
    """,
}


@pytest.fixture(autouse=True)
def _from_the_top(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("jtrain ", [*VERBS]),
        ("jtrain sh", ["show"]),
        ("jtrain run dig", ["digits"]),
        ("jtrain run conf", ["configs/"]),
        ("jtrain run configs/dig", ["configs/digits.yaml"]),
        ("jtrain run digits --fa", ["--fast"]),
        ("jtrain run digits opt", ["optimizer."]),
        ("jtrain run digits optimizer.l", ["optimizer.lr="]),
        ("jtrain run digits optimizer.kind=adam", ["optimizer.kind=adam", "optimizer.kind=adamw"]),
        ("jtrain run digits optimizer.kind=adam optimizer.b", ["optimizer.b1=", "optimizer.b2="]),
        ("jtrain run digits --fast parallel.kind=fs", ["parallel.kind=fsdp"]),
        ("jtrain sweep digits --search ", ["optuna"]),
        ("jtrain ckpt ", ["verify", "export"]),
        ("jtrain ckpt rm x --dam", ["--damaged"]),
        ("jtrain data show shakes", ["shakespeare"]),
        ("jtrain launch --processes 2 ru", ["run"]),
        ("jtrain launch --processes 2 run digits ste", ["steps="]),
        ("jtrain launch --proc", ["--processes"]),
        ("jtrain launch run digits --overfit 1 ste", ["steps="]),
        ("jtrain completion f", ["fish"]),
    ],
)
def test_a_word_is_completed(line: str, some: list[str]):
    found = complete(line)
    word = "" if line.endswith(" ") else line.split()[-1]
    assert set(some) <= set(found)
    assert all(one.startswith(word) for one in found)


def test_runs_are_completed_by_their_names(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("wide", "sweep/lr=1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("")
    assert complete("jtrain eval ") == ["sweep/lr=1", "wide"]
    assert complete("jtrain report wide sw") == ["sweep/lr=1"]
    assert complete("jtrain ckpt ls w") == ["wide"]


@pytest.mark.parametrize(
    "line",
    ["", "jtrain", "jtrain fly ", "jtrain run nowhere.yaml ste", "jtrain predict digits --out ",
     "jtrain run digits steps=", "jtrain run digits optimizer.kind=wrong opt",
     "jtrain run 'half a qu", "jtrain ckpt fly "],
)  # fmt: skip
def test_where_nothing_is_known_the_shell_completes_files(line: str):
    assert complete(line) == []


@pytest.mark.parametrize(
    ("shell", "lines"),
    [("bash", 2), *(pytest.param(shell, 4, marks=pytest.mark.thorough) for shell in SCRIPTS)],
)
def test_the_script_works_in_its_shell(shell: str, lines: int, tmp_path: Path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    jtrain = tmp_path / "jtrain"
    jtrain.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jtrain "$@"\n')
    jtrain.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    expected = {
        "jtrain sa": ["sample"],
        "jtrain run digits optimizer.kind=sg": ["sgd" if shell == "bash" else "optimizer.kind=sgd"],
        "jtrain show digits --sch": ["--schema"],
        "jtrain run digits opt": ["optimizer."],
    }
    for line, some in [*expected.items()][:lines]:
        command = [program, "-c", ASK[shell]]
        done = subprocess.run(
            command,
            env={**env, "LINE": line},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode, done.stdout.split()) == (0, some), (line, done.stderr)


def test_a_shell_that_is_not_known_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
    assert main(["completion"]) == 2
    assert "name a shell: bash, zsh, fish" in capsys.readouterr().err
