"""A rehearsal: each fault happens once, the run recovers from all, and nothing is lost."""

import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ
from quick_study import kept, trained, write_study

FAULTS = "raise:1@step3,kill:0@step7,stall:1@step9,full-disk@save1,term:0@step11"


def command(home: Path, compiled: Path, *words: str) -> str:
    env = plain_environ()
    done = subprocess.run(
        [sys.executable, "-m", "jtrain", *words],
        cwd=home,
        env=env | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_rehearsed_run_ends_like_an_undisturbed_run(
    tmp_path_factory: pytest.TempPathFactory, compiled: Path, monkeypatch: pytest.MonkeyPatch
):
    hurt, calm = tmp_path_factory.mktemp("hurt"), tmp_path_factory.mktemp("calm")
    launched = ["launch", "--processes", "2", "--patience", "step=10,data=10,save=10"]
    run = ["run", "configs/quick.yaml", "parallel.kind=mirrored", "checkpoint.every=2"]
    for home in (hurt, calm):
        write_study(home)
    said = command(hurt, compiled, *launched, "--chaos", FAULTS, *run)
    command(calm, compiled, *launched, *run)
    table = said[said.index("rehearsed  ") :].splitlines()[1:]
    faults = FAULTS.split(",")
    came = {fault: line for line in table for fault in faults if line.startswith(f"{fault} ")}
    assert set(came) == set(faults), said
    assert came["stall:1@step9"].endswith("  stuck")
    states = []
    for home in (hurt, calm):
        monkeypatch.chdir(home)
        states.append(kept(trained(*run[1:])))
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if states[0][name] != states[1][name]] == []
