"""docs/from_scratch.py runs as printed, and what it rebuilds is what jtrain does."""

import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent


def test_what_is_rebuilt_from_jax_alone_equals_jtrain():
    env = plain_environ()
    done = subprocess.run(
        [sys.executable, "-W", "error", "docs/from_scratch.py"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    far = {line.split()[0]: float(line.split()[-2]) for line in lines if line.endswith(" away")}
    assert far.keys() == {"microbatches", "shard_map", "fsdp"}
    assert max(far.values()) < 1e-6
    assert lines[-1].startswith("evaluation")


def test_its_first_part_knows_nothing_of_jtrain():
    text = (ROOT / "docs" / "from_scratch.py").read_text()
    rebuilt, _, compared = text.partition("\n# 9. ")
    assert "import jtrain" not in rebuilt
    assert "import jtrain" in compared
