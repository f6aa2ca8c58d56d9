"""Memory that is freed stays with the process: page faults of a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from jtrain.train.allocator import reuse_memory

reuses = reuse_memory()
np.ones(100 << 20, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(100 << 20, np.uint8)
print(int(reuses), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 >> 20)
"""
UNSET = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("variables", "reuses"),
    [
        ({}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
    ],
    ids=str,
)
def test_an_allocation_of_100_mb_faults_once(variables, reuses):
    command = [sys.executable, "-c", FAULTS]
    environ = {**UNSET, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    found, megabytes = map(int, done.stdout.split())
    assert found == reuses
    # Huge pages, where the system gives them, fault less often: only the upper bound is sure.
    assert megabytes < 10 or not reuses
