"""No program exits with 0 without the checkpoint that it has saved."""

import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.checkpoint import CheckpointManager, layout

SCRIPT = Path(__file__).with_name("writing_process.py")


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        pytest.param("end", 0, "", marks=pytest.mark.thorough),
        pytest.param("exit", 0, "", marks=pytest.mark.thorough),
        ("raise", 1, "RuntimeError: a mistake of somebody's\n"),
    ],
)
def test_a_program_that_ends_during_a_save_waits_for_the_seal(tmp_path, how, code, told):
    command = [sys.executable, str(SCRIPT), str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.endswith(told)) == (code, True), done.stderr
    assert "Orbax" not in done.stderr
    assert not told or done.stderr.count("Traceback") == 1
    assert layout.find_faults(tmp_path, 1, full=True) == []
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.thorough
def test_a_program_whose_last_save_fails_exits_with_70(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 70
    assert done.stderr.startswith("checkpoint 1 could not be written")
    assert len(done.stderr.splitlines()) == 1
    assert CheckpointManager(tmp_path).steps() == []
