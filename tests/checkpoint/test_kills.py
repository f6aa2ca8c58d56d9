"""A process that is killed, interrupted or ends during a save loses no earlier checkpoint."""

import contextlib
import dis
import gc
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_states import like, same_bits
from writing_process import state_of

from jtrain.checkpoint import CheckpointManager, layout

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("writing_process.py")


def start_and_kill(directory: Path, least: int, sign: str) -> None:
    """Kill the process (SIGKILL) in the save of a step from `least` on, when a file matches `sign`.

    Where the kill comes between two saves after all, which proves nothing, start the process again.
    """
    for _ in range(50):
        with subprocess.Popen([sys.executable, str(SCRIPT), str(directory), "forever"]) as process:
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


def test_kill_9_during_a_save_leaves_older_checkpoints_valid(tmp_path: Path):
    start_and_kill(tmp_path, 3, "*")
    newest = check_all_steps(tmp_path, at_least=2)

    start_and_kill(tmp_path, newest + 2, "state.*/**/d/*")
    newest = check_all_steps(tmp_path, at_least=newest + 1)

    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(newest + 1, state_of(newest + 1), {"step": newest + 1})
    assert layout.list_leftovers(tmp_path) == []
    assert check_all_steps(tmp_path, at_least=newest + 1) == newest + 1


SMALL = {"w": jnp.arange(1000.0), "step": jnp.int32(0)}


def save_state(checkpoints: CheckpointManager, step: int) -> None:
    checkpoints.save(step, SMALL | {"step": jnp.int32(step)}, {})
    checkpoints.wait()


def interrupted(function, moment: int, kept: list[KeyboardInterrupt]) -> bool:
    """Return whether a KeyboardInterrupt came, at the n-th point where Python checks for signals.

    That is after a call, at a function's beginning and where a loop turns back.
    """
    left, last, came = moment, {}, False

    def trace(frame, event, _):
        nonlocal left, came
        frame.f_trace_opcodes = "jtrain" in frame.f_code.co_filename
        if event == "call":
            last[id(frame)] = ""
        elif event == "opcode":
            done = last.get(id(frame), "")
            last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= done.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if left < 0 and not came:
                came = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt as error:
        kept.append(error)
    finally:
        sys.settrace(before)
    return came


# An interrupt in a callback of the garbage collector is printed and not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_saves_after_an_interrupt_are_valid_and_so_are_earlier_ones(tmp_path: Path):
    def save_and_wait(checkpoints: CheckpointManager, step: int) -> None:
        checkpoints.prepare()
        save_state(checkpoints, step)
        checkpoints.close()

    kept: list[KeyboardInterrupt] = []
    moment, step, came = 0, 0, True
    with CheckpointManager(tmp_path / "kept", keep=3) as checkpoints:
        while came:
            came = interrupted(lambda step=step: save_and_wait(checkpoints, step), moment, kept)
            save_state(checkpoints, step + 1)
            assert step + 1 in checkpoints.steps()
            for each in checkpoints.steps():
                found = checkpoints.restore(each, like(SMALL))
                assert same_bits(found, SMALL | {"step": jnp.int32(each)})
            step += 2
            moment += 3  # about a hundred moments, of 290
    assert len(kept) >= 80, "too few to prove anything"
    # Files that an interrupt left open are closed here, not in the next test.
    kept.clear()
    gc.collect()


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("end", 0, ""), ("raise", 1, "RuntimeError: a mistake of somebody's\n")],
)
def test_a_program_that_ends_during_a_save_waits_for_the_seal(tmp_path, how, code, told):
    command = [sys.executable, str(SCRIPT), str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.endswith(told)) == (code, True), done.stderr
    assert "Orbax" not in done.stderr
    assert not told or done.stderr.count("Traceback") == 1
    assert layout.find_faults(tmp_path, 1, full=True) == []
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_program_whose_last_save_fails_exits_with_70(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 70
    assert done.stderr.startswith("checkpoint 1 could not be written")
    assert len(done.stderr.splitlines()) == 1
    assert CheckpointManager(tmp_path).steps() == []
