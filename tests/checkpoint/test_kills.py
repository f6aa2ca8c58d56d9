"""A process that is killed while it saves loses nothing that it had saved."""

import subprocess
import sys
import time
from pathlib import Path

from checkpoint_states import like, same_bits
from killed_process import state_of

from jtrain.checkpoint import CheckpointManager, layout

SCRIPT = Path(__file__).with_name("killed_process.py")


def start_and_kill(directory: Path, sign: str) -> None:
    """Starts the process, and kills it (SIGKILL) when a path that `sign` matches appears."""
    with subprocess.Popen([sys.executable, str(SCRIPT), str(directory)]) as process:
        try:
            end = time.monotonic() + 60
            while not list(directory.glob(sign)):
                assert process.poll() is None, "the process ended by itself"
                assert time.monotonic() < end, f"{sign} never appeared"
        finally:
            process.kill()
    assert process.returncode == -9


def check_whole(directory: Path, at_least: int) -> int:
    """The newest step, after every listed one was restored and compared."""
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


def test_kill_9_in_a_save_leaves_the_older_ones_whole(tmp_path: Path):
    start_and_kill(tmp_path, "3.saving")
    assert layout.leftovers(tmp_path), "the kill came between two saves: it proves nothing"
    newest = check_whole(tmp_path, at_least=2)

    start_and_kill(tmp_path, f"{newest + 2}.saving/state.*/**/d/*")
    assert layout.leftovers(tmp_path), "the kill came between two saves: it proves nothing"
    newest = check_whole(tmp_path, at_least=newest + 1)

    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(newest + 1, state_of(newest + 1), {"step": newest + 1})
    assert layout.leftovers(tmp_path) == []
    assert check_whole(tmp_path, at_least=newest + 1) == newest + 1
