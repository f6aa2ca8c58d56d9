"""Every start of JAX in several processes sets the listening address; the default is all."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.distributed.heartbeat import Patience
from jtrain.distributed.heartbeat.channel import Channel

ROOT = Path(__file__).parents[3]


@pytest.mark.thorough
def test_every_call_sets_the_listening_address():
    found = 0
    for folder in ("jtrain", "tests", "benchmarks", "experiments"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                if ast.unparse(node.func).endswith("distributed.initialize"):
                    found += 1
                    said = {word.arg for word in node.keywords}
                    assert "coordinator_bind_address" in said, f"{file}:{node.lineno}"
    assert found >= 4


# Prints the heartbeat timeout that `start` passes to JAX in one of two processes.
HEARTBEAT = """
import sys
import jax
from jtrain.distributed.cluster import Cluster, start
from jtrain.distributed.cluster.cluster import CoordinatorAddress

sys.modules["jtrain.distributed.cluster.start"].meet = lambda *_, **__: None
jax.distributed.initialize = lambda *_, **told: print(told["heartbeat_timeout_seconds"])
start(Cluster(processes=2, coordinator=CoordinatorAddress("127.0.0.1", 1)), {}, timeout=1)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("watched", [False, True])
def test_the_heartbeat_is_patient_under_a_launcher(watched: bool):
    with Channel() as channel:
        done = subprocess.run(
            [sys.executable, "-c", HEARTBEAT],
            env={**os.environ, **(channel.environ if watched else {})},
            pass_fds=channel.files,
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stderr
    longest = max(Patience().floors.values())
    assert (int(done.stdout) > 10 * longest) == watched
