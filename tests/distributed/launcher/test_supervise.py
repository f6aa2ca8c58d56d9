"""Restarts after a failure, and the final report; a process that is stuck or stopped is named."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import ended, of, when_written

from jtrain.distributed.launcher import launch, process_group
from jtrain.distributed.watchdog import Patience

# Each attempt appends a letter to the file of its process: the size is the number of attempts.
LIFE = "mine = open(f'{os.environ[\"HERE\"]}/{me}', 'a+'); mine.write('x'); mine.flush();"
LIFE += "life = os.path.getsize(mine.name);"
HEARTBEAT = (
    "from jtrain.distributed.heartbeat import HEARTBEAT, connect_heartbeat; connect_heartbeat();"
)
SELF_KILLED = "os.kill(os.getpid(), 9)"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERE", str(tmp_path))
    return tmp_path


def attempts(here: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(here.glob("?"))]


def watched(code: str) -> list[str]:
    """Return a command that can import jtrain, and so beat."""
    return [part for part in of(LIFE + HEARTBEAT + code) if part != "-S"]


def test_all_are_restarted_when_one_fails(here: Path, capfd):
    code = f"open('{here}/port', 'a').write(os.environ['JTRAIN_COORDINATOR'] + ' ');"
    code += "there = lambda: os.path.exists(other) and os.path.getsize(other) == life\n"
    code += f"other = '{here}/0'\n"
    code += "while life < 3 and not (me and there()): time.sleep(0.01)\n"
    code += "life < 3 and os.kill(os.getpid(), 9)"
    assert launch(of(LIFE + code), processes=2, restarts=2) == 0
    assert attempts(here) == [3, 3]
    said = capfd.readouterr().err
    assert "process 1 ended (SIGKILL) before the first step. Restarted (1 of 2).\n" in said
    assert "Restarted (2 of 2)" in said
    assert len(set((here / "port").read_text().split())) == 3, "a new port for each attempt"


@pytest.mark.parametrize("code", [2, 75])
def test_a_done_mistaken_or_stopped_run_is_not_restarted(here: Path, code: int):
    assert launch(of(LIFE + f"sys.exit({code})"), processes=1, restarts=3) == code
    assert attempts(here) == [1]


def test_a_third_failure_at_one_step_ends_with_a_diagnosis(here: Path, capfd):
    run = here / "runs" / "try"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 6, "loss": 0.5}\n{"step": 7, "x": 1}\n{"st')
    code = "from pathlib import Path;"
    code += f"HEARTBEAT.begin_run(Path('{run}'), 25.0); HEARTBEAT.beat('data', 7)\n"
    code += "raise ValueError('row 9')"
    assert launch(watched(code), processes=1, restarts=9) == 1
    assert attempts(here) == [3]
    said = capfd.readouterr().err
    assert "3 attempts in a row ended no later than step 7" in said
    assert "fails in     step 8, batch 7 of the training data" in said
    assert "last loss    0.5 at step 6" in said
    assert f"jtrain data show {run}/config.yaml --step 7" in said
    assert said.rstrip().endswith("process 0 failed (exit code 1), and all were ended")


def test_a_run_that_its_guard_stopped_is_not_restarted(here: Path, capfd):
    run = here / "try"
    (run / "checkpoints" / "2").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"step": 4, "batch": 6, "done": "stopped"}\n')
    (run / "run.json").write_text('{\n  "status": "failed",\n  "step": 9,\n  "why": "so bad"\n}')
    code = f"from pathlib import Path\nHEARTBEAT.begin_run(Path('{run}'), 25.0)\n"
    code += "HEARTBEAT.beat('data', 9); sys.exit(70)"
    assert launch(watched(code), processes=1, restarts=2) == 70
    assert attempts(here) == [1]
    said = capfd.readouterr().err
    assert "the guard stopped the run at step 4, where a restart would stop again" in said
    assert "Restarted" not in said


@pytest.mark.thorough
def test_a_run_that_makes_progress_is_restarted(here: Path):
    code = "HEARTBEAT.beat('data', min(life, 2)); HEARTBEAT.saved(life)\n"
    code += "sys.exit(0 if life == 4 else 70)"
    assert launch(watched(code), processes=1, restarts=9) == 0
    assert attempts(here) == [4]


# The processes wait for each other, so that neither is watched before the other one is.
MEET = "open(f'{os.environ[\"HERE\"]}/met-{me}', 'w').close()\n"
MEET += "while not os.path.exists(f'{os.environ[\"HERE\"]}/met-{1 - me}'): time.sleep(0.001)\n"
HANGS = {
    "waits for data": "HEARTBEAT.beat('data', 20); open(os.environ['HERE'] + '/pipe').read()",
    "is stopped": "HEARTBEAT.beat('step', 20); os.kill(os.getpid(), 19)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", HANGS)
def test_a_stuck_process_is_named_with_the_stacks_of_all(here: Path, monkeypatch, capfd, how: str):
    monkeypatch.setattr(process_group, "DUMP", 20.0)
    os.mkfifo(here / "pipe")
    run = here / "runs" / "try"
    run.mkdir(parents=True)
    code = "\nif life > 1: sys.exit()\nfrom pathlib import Path\n" + MEET
    code += f"HEARTBEAT.begin_run(Path('{run}'), 25.0)\nif me: {HANGS[how]}\n"
    code += "def waits_for_the_other(): time.sleep(600)\n"
    code += "HEARTBEAT.beat('step', 20); waits_for_the_other()"
    began = time.monotonic()
    patience = Patience.parse("1")
    assert launch(watched(code), processes=2, restarts=1, patience=patience) == 0
    assert time.monotonic() - began < 300
    said = capfd.readouterr().err
    assert re.search(r"launch: process 1 has been .*; process 0 has been in step 21, for", said)
    assert "s, of 1.0 s allowed" in said
    assert "Restarted (1 of 1) from the beginning: no checkpoint was sealed yet.\n" in said
    assert ("stopped by a signal" in said) == (how == "is stopped")
    assert "waits_for_the_other" in (run / "stacks-0.txt").read_text()
    assert "<string>" in (run / "stacks-1.txt").read_text()


def test_a_hang_without_a_restart_exits_with_124(here: Path, monkeypatch, capfd):
    monkeypatch.setattr(process_group, "DUMP", 20.0)
    code = "HEARTBEAT.beat('save', 20); time.sleep(600)"
    assert launch(watched(code), processes=1, patience=Patience.parse("save=0.5")) == 124
    said = capfd.readouterr().err
    how_long = re.search(r"process 0 has been in the phase save, step 20, for (\d+\.\d) s", said)
    assert how_long is not None
    assert float(how_long[1]) >= 0.5
    assert said.endswith("All were ended.\n")
    stacks = said.partition("process 0:\n")[2]
    assert "Current thread" in stacks or "Thread 0x" in stacks
    assert "<string>" in stacks


@pytest.mark.parametrize(
    ("mark", "end", "other", "code"),
    [
        # As JAX does if a peer is gone.
        ("HEARTBEAT.note_failure();", "sys.exit(5)", "os.abort()", 5),
        ("", SELF_KILLED, "HEARTBEAT.note_failure(); sys.exit(6)", 137),
    ],
)
def test_the_first_failure_is_reported_though_another_process_exited_before(
    here: Path, monkeypatch: pytest.MonkeyPatch, mark: str, end: str, other: str, code: int
):
    monkeypatch.setattr(process_group, "FAREWELL", 20.0)
    begins = f"\nif me: {mark} open('{here}/failed', 'w'); time.sleep(0.3); {end}\n"
    begins += f"while not os.path.exists('{here}/failed'): time.sleep(0.001)\n"
    assert launch(watched(begins + other), processes=2) == code


def test_a_signalled_launch_is_not_restarted(here: Path):
    (here / "pids").mkdir()
    code = LIFE + f"open(f'{here}/pids/{{os.getpid()}}', 'w'); time.sleep(60)"
    starts = (
        "from jtrain.distributed.launcher import launch;"
        f"raise SystemExit(launch({of(code)!r}, processes=2, restarts=5))"
    )
    process = subprocess.Popen([sys.executable, "-c", starts])
    when_written(here / "pids", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 75, "nothing was lost: no step had begun"
    assert attempts(here) == [1, 1]
    assert ended(here / "pids")
