"""Of a write that fails one error is told, and nothing of what failed with it."""

import subprocess
import sys
from pathlib import Path

import pytest

SAVES = """\
import resource, sys
from pathlib import Path

import jax.numpy as jnp

from jtrain.checkpoint import Checkpoints
from jtrain.checkpoint.failed import SaveError

resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
state = {f"w{i}": jnp.full((100, 100), i) for i in range(20)}
with Checkpoints(Path(sys.argv[1])) as checkpoints:
    for step in (1, 2, 3):
        try:
            checkpoints.save(step, state, {})
            checkpoints.wait()
        except SaveError as error:
            print(error)
"""


@pytest.mark.thorough
def test_a_write_that_fails_is_told_in_a_line(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path / "kept")], capture_output=True, text=True
    )
    lines = ran.stdout.splitlines()
    assert (ran.returncode, ran.stderr, len(lines)) == (0, "", 3)
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"checkpoint {step} could not be written to {tmp_path}/kept: it ")
        assert line.endswith(
            "raise the limit (ulimit -f), and run again: it goes on from the beginning."
        )
