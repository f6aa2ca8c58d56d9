"""Jobs that are started wrongly end at once, with advice that works."""

import re
import shutil
from pathlib import Path

import pytest
from slurm_jobs import Script

pytestmark = pytest.mark.slow
RUN = "jtrain run configs/hurt.yaml parallel.kind=mirrored steps=3"
TWO = ("--nodes=2", "--ntasks-per-node=1")


def test_without_srun_one_run_trains_and_says_so_and_others_are_refused(script: Script, home: Path):
    alone = RUN.replace("mirrored", "single").replace("steps=3", "steps=60")
    lines = f"for i in 0 1; do ({alone}; echo code $?) & done; wait"
    _, said = script(lines, *TWO)
    assert sorted(re.findall(r"^code (\d+)$", said, re.MULTILINE)) == ["0", "2"], said
    assert "a Slurm job of 2 tasks, and srun did not start this process: type srun" in said
    assert re.search(r"process \d+.* (is writing|writes|trains)", said), said
    rows = (home / "runs" / "hurt" / "metrics.jsonl").read_text().splitlines()
    assert len([row for row in rows if '"loss"' in row]) == 60, "each row once"


def test_a_coordinator_port_in_use_is_named_and_another_can_be_set(script: Script):
    busy = (
        "python -c 'import os, socket, time; "
        'listener = socket.create_server(("node1", 61440 + int(os.environ["SLURM_JOB_ID"]))); '
        'print("busy", flush=True); time.sleep(60)\' &\nsleep 1'
    )
    lines = f"{busy}\nsrun --kill-on-bad-exit=1 {RUN}\necho code $?"
    _, said = script(lines, *TWO)
    assert re.search(r"process 0 cannot listen at node1:\d+ .*Address already in use", said), said
    assert "Set JTRAIN_COORDINATOR=HOST:PORT" in said
    assert "Traceback" not in said
    code, said = script(f"{busy}\nJTRAIN_COORDINATOR=node1:8500 srun {RUN}", *TWO)
    assert code == 0, said
    assert "process 0 of 2 (Slurm) at node1:8500" in said


def test_tasks_in_different_folders_are_told_that_they_share_no_disk(script: Script, home: Path):
    for name in ("0", "1"):
        shutil.copytree(home / "configs", home / name / "configs")
        shutil.copytree(home / "experiments", home / name / "experiments")
    code, said = script(f"srun bash -c 'cd $SLURM_PROCID && {RUN}'", *TWO)
    assert code == 2, said
    assert "runs/hurt was created by process 0, and process 1 does not see it" in said
    assert "Run in a file system that all processes share" in said
    assert "Traceback" not in said
