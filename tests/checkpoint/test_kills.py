"""A process that is killed during a save loses no earlier checkpoint."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_states import like, same_bits
from killed_process import state_of

from jtrain.checkpoint import CheckpointManager, layout

SCRIPT = Path(__file__).with_name("killed_process.py")


def start_and_kill(directory: Path, least: int, sign: str) -> None:
    """Kill the process (SIGKILL) in the save of a step from `least` on, when a file matches `sign`.

    Where the kill comes between two saves after all, which proves nothing, start the process again.
    """
    for _ in range(50):
        with subprocess.Popen([sys.executable, str(SCRIPT), str(directory)]) as process:
            try:
                end = time.monotonic() + 300
                while not is_saving(directory, least, sign):
                    assert process.poll() is None, "the process ended by itself"
                    assert time.monotonic() < end, f"{sign} never appeared"
            finally:
                process.kill()
        assert process.returncode == -9
        if layout.list_leftovers(directory):
            return
    pytest.fail("each kill came between two saves")


def is_saving(directory: Path, least: int, sign: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
        folders = [path for path in directory.glob("*.saving") if int(path.stem) >= least]
        return any(True for folder in folders for _ in folder.glob(sign))
    return False


def check_all_steps(directory: Path, at_least: int) -> int:
    """Restore and compare every listed step, and return the newest."""
    checkpoints = CheckpointManager(directory)
    steps = checkpoints.steps()
    assert steps, "nothing was saved"
    for step in steps:
        expected = state_of(step)
        assert same_bits(checkpoints.restore(step, like(expected)), expected)
        assert checkpoints.about(step) == {"step": step}
    assert steps[-1] >= at_least
    checkpoints.close()
    return steps[-1]


@pytest.mark.thorough  # test_layout.py is killed before each change of a save by default
def test_kill_9_during_a_save_leaves_older_checkpoints_valid(tmp_path: Path):
    start_and_kill(tmp_path, 3, "*")
    newest = check_all_steps(tmp_path, at_least=2)

    start_and_kill(tmp_path, newest + 2, "state.*/**/d/*")
    newest = check_all_steps(tmp_path, at_least=newest + 1)

    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(newest + 1, state_of(newest + 1), {"step": newest + 1})
    assert layout.list_leftovers(tmp_path) == []
    assert check_all_steps(tmp_path, at_least=newest + 1) == newest + 1
