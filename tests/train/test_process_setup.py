"""What a process sets before it computes: the devices of its CPU, and the memory it reuses."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from quick_study import write_study

SHORT = ["steps=1", "batch=4", "evaluate.every=0", "name=split"]


def child(words: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing says how many devices a CPU has."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    env = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.thorough
def test_a_run_splits_the_cpu_into_the_devices_it_asks_for(tmp_path: Path):
    settings = ["parallel.kind=fsdp", "parallel.devices=2"]
    done = child(["-m", "jtrain", "run", str(write_study(tmp_path)), *SHORT, *settings], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fsdp over 2 cpu devices" in done.stdout


FAULTS = """
import resource
import numpy as np
from jtrain.train.runtime import reuse_memory

reuses = reuse_memory()
np.ones(100 << 20, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(100 << 20, np.uint8)
print(int(reuses), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 >> 20)
"""

UNSET = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_an_allocation_of_100_mb_faults_once():
    command = [sys.executable, "-c", FAULTS]
    environ = {**UNSET, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    found, megabytes = map(int, done.stdout.split())
    assert found == 1, "it is reused"
    # Huge pages, where the system gives them, fault less often: only the upper bound is sure.
    assert megabytes < 10
