"""Machines that begin one run without knowing of one another: one trains, and is joined as told."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quick_study import CODE, write_study

from jtrain.distributed.launcher.port import free_port
from jtrain.train.hooks.metrics import read_metrics

# `jtrain run` on a machine named argv[1], which other machines share the disk with.
MACHINE = """
import socket, sys

host = sys.argv[1]
socket.gethostname = lambda: host
from jtrain.cli import main
from jtrain.checkpoint import lock, writer_beat

writer_beat.BEAT, writer_beat.WATCH = 0.2, 60.0
writer_beat.is_shared = lambda _: True
lock._try_flock = lambda _: True
sys.exit(main(["run", "configs/quick.yaml", "checkpoint.every=0", *sys.argv[2:]]))
"""
SLOW = CODE.replace(
    "    return Arrays(", "    import time\n\n    time.sleep(3)\n    return Arrays("
)


def machine(home: Path, host: str, *values: str, **environ: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", MACHINE, host, *values],
        cwd=home,
        env=os.environ | {"XLA_FLAGS": ""} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
def test_one_of_two_machines_trains_and_the_advice_joins_them(tmp_path: Path, compiled: Path):
    write_study(tmp_path, SLOW)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    pods = [machine(tmp_path, f"pod-{i}", **cache) for i in range(2)]
    said = [pod.communicate(timeout=240)[1] for pod in pods]
    codes = [pod.returncode for pod in pods]
    assert sorted(codes) == [0, 2], said
    error = said[codes.index(2)]
    winner = codes.index(0)
    assert f"on pod-{winner} writes there since" in error
    told = re.search(r"set JTRAIN_COORDINATOR=(\S+) and JTRAIN_PROCESSES=(\d+)", error)
    assert told is not None
    rows = read_metrics(tmp_path / "runs/quick/metrics.jsonl")
    assert len({str(row) for row in rows}) == len(rows), "the refused one wrote no row"

    # The advice, with an address of this machine for the name of the other.
    where = re.sub(r"^pod-\d:\d+$", f"127.0.0.1:{free_port()}", told[1])
    joined = [
        machine(
            tmp_path,
            f"pod-{i}",
            "name=joined",
            "parallel.kind=mirrored",
            JTRAIN_COORDINATOR=where,
            JTRAIN_PROCESSES=told[2],
            JTRAIN_PROCESS=f"{i}",
            **cache,
        )
        for i in range(2)
    ]
    said = [pod.communicate(timeout=240) for pod in joined]
    assert [pod.returncode for pod in joined] == [0, 0], said
    assert "process 0 of 2 (jtrain)" in said[0][0]
