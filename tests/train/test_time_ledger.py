"""The ledger adds up to the time of a run, and says which time was lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from quick_study import write_study

from jtrain.checkpoint.layout import list_named_steps
from jtrain.cli import main
from jtrain.distributed.heartbeat.heartbeat import Heartbeat
from jtrain.errors import CheckpointError
from jtrain.train.time_ledger import format_goodput, format_ledger, make_ledger, read_ledger


def row(step, seconds, /, *, began=100.0, resumed=False, **phases):
    assert sum(phases.values()) == pytest.approx(seconds)
    made = {"step": step, "began": began, "seconds": seconds, "phases": phases}
    return made | ({"resumed": True} if resumed else {})


def test_phases_are_entries():
    ledger = make_ledger(
        [
            row(0, 5.0, resumed=True, start=2.0, compile=3.0),
            row(10, 18.0, start=2.0, compile=3.0, step=6.0, hooks=2.0, data=4.0, eval=1.0),
            row(
                20, 22.0, start=2.0, compile=3.0, step=8.0, hooks=2.0, data=4.0, eval=1.0, save=2.0
            ),
        ]
    )
    found = {name: x for name, x in ledger.seconds.items() if x}
    assert found == {
        "start": 2.0,
        "compilation": 3.0,
        "training": 10.0,
        "waiting for data": 4.0,
        "evaluation": 1.0,
        "checkpoints": 2,
    }
    assert (ledger.total, ledger.attempts) == (22.0, 1)
    assert ledger.goodput == pytest.approx(10 / 22)


def test_a_killed_attempt_lost_its_steps_after_the_checkpoint():
    ledger = make_ledger(
        [
            row(0, 5.0, resumed=True, start=5.0),
            row(10, 15.0, start=5.0, step=10.0),
            row(20, 25.0, start=5.0, step=20.0),  # killed at 130 s, with a checkpoint of step 15
            row(15, 6.0, began=132.0, resumed=True, start=6.0),
            row(30, 21.0, began=132.0, start=6.0, step=15.0),
        ]
    )
    # Steps 16 .. 20 took 5 s; 13 s passed from the last row, at 125 s, until the next training.
    assert ledger.seconds["lost"] == pytest.approx(5.0)
    assert ledger.seconds["restarts"] == pytest.approx(7.0 + 6.0)
    assert ledger.seconds["training"] == pytest.approx(15.0 + 15.0)
    assert ledger.total == pytest.approx(132.0 + 21.0 - 100.0)
    assert ledger.attempts == 2


def test_a_rollback_loses_what_it_repeats():
    ledger = make_ledger(
        [
            row(0, 1.0, resumed=True, start=1.0),
            row(10, 11.0, start=1.0, step=10.0),
            row(4, 13.0, resumed=True, start=1.0, step=10.0, restore=2.0),
            row(10, 19.0, start=1.0, step=16.0, restore=2.0),
        ]
    )
    assert ledger.attempts == 1
    assert ledger.seconds["lost"] == pytest.approx(6.0)
    assert ledger.seconds["start"] == pytest.approx(1.0 + 2.0)  # and the restore that it took
    assert ledger.seconds["training"] == pytest.approx(4.0 + 6.0)
    assert ledger.total == pytest.approx(19.0)


def test_steps_that_were_lost_twice_count_twice():
    ledger = make_ledger(
        [
            row(0, 0.0, resumed=True),
            row(10, 10.0, step=10.0),
            row(5, 0.0, began=110.0, resumed=True),
            row(9, 4.0, began=110.0, step=4.0),
            row(2, 0.0, began=114.0, resumed=True),
            row(10, 8.0, began=114.0, step=8.0),
        ]
    )
    assert ledger.seconds["training"] == pytest.approx(2.0 + 8.0)
    assert ledger.seconds["lost"] == pytest.approx(8.0 + 4.0)


def test_time_within_a_block_counts_for_the_block(monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.seconds, seconds=100.0)
    monkeypatch.setattr("jtrain.distributed.heartbeat.heartbeat.time", now)
    heartbeat = Heartbeat()
    heartbeat.begin_run(Path("runs/x"), 25.0)
    with heartbeat.during("eval"):
        heartbeat.phase("data")
        now.seconds += 2.0
        heartbeat.phase("eval")
    heartbeat.phase("step")
    now.seconds += 1.0
    found = heartbeat.seconds()
    assert found["eval"] == 2.0
    assert found["step"] == 1.0
    assert found["data"] == 0
    assert sum(found.values()) == found["eval"] + found["step"]


def test_a_run_has_a_ledger_and_the_verb_shows_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_study(tmp_path)
    began = time.monotonic()
    assert main(["run", str(path), "evaluate.every=4"]) == 0
    wall = time.monotonic() - began
    assert "time: " in capsys.readouterr().out
    assert main(["show", "quick", "--ledger"]) == 0
    table = capsys.readouterr().out
    assert "training" in table
    assert "started once" in table
    assert main(["show", "runs/quick/config.yaml", "--ledger", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"] == pytest.approx(sum(found["seconds"].values()), abs=0.01)
    assert found["seconds"]["evaluation"] > 0
    process = found["total"] - wall  # it began before this test
    assert process > -0.5
    ledger = read_ledger(Path("runs/quick/time.jsonl"))
    assert ledger is not None
    assert format_ledger(ledger) == table.rstrip("\n")
    assert "in all" in format_goodput(ledger)


def test_without_a_file_the_verb_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("experiment: digits\n")
    assert main(["show", "old", "--ledger"]) == 2
    assert "has not begun to train" in capsys.readouterr().err
    assert main(["show", "old", "x=1", "--ledger"]) == 2
    assert "takes one run" in capsys.readouterr().err
    (run / "time.jsonl").write_text('{"step": 1, "seconds": 2}\n')
    with pytest.raises(CheckpointError, match=r"mv .*time.jsonl"):
        read_ledger(run / "time.jsonl")


@pytest.mark.thorough
def test_a_killed_and_resumed_run_adds_up_to_the_time_on_the_clock(tmp_path):
    path = write_study(tmp_path)
    settings = ["steps=20000", "checkpoint.every=500", "evaluate.every=5000", "log.every=500"]
    command = [sys.executable, "-m", "jtrain", "run", str(path), *settings]
    began, started = time.monotonic(), time.time()
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, env={**os.environ})
    forked = time.time() - started  # the process began within these seconds
    checkpoints = tmp_path / "runs" / "quick" / "checkpoints"
    while max(list_named_steps(checkpoints), default=0) < 2000:
        assert time.monotonic() - began < 300
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    times = tmp_path / "runs" / "quick" / "time.jsonl"
    wall = times.stat().st_mtime - started  # until the last row; the program ends a little later
    ledger = read_ledger(times)
    assert ledger is not None
    assert ledger.attempts == 2
    assert ledger.seconds["restarts"] > 1.0
    assert ledger.seconds["checkpoints"] > 0
    assert ledger.seconds["evaluation"] > 0
    assert ledger.total == pytest.approx(wall - forked / 2, rel=0.01, abs=0.1 + forked / 2)
