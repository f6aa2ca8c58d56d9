"""A full, unwritable or failing disk is found before training, or at the next call, with advice."""

import gc
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import like, same_bits
from faulty_disks import files_of_at_most, permissions_hold

from jtrain.checkpoint import CheckpointManager, check_writable, lock
from jtrain.checkpoint.retention import count_saves
from jtrain.checkpoint.save_errors import SaveError
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice

# Failed tasks of the storage library sometimes log when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect failed tasks in this file, not in the test of another file."""
    yield
    gc.collect()


STATE = {"w": jnp.arange(200_000.0), "step": jnp.int32(1)}


def save_and_wait(checkpoints: CheckpointManager, step: int) -> None:
    checkpoints.save(step, STATE, {})
    checkpoints.wait()


def save_and_check(checkpoints: CheckpointManager, step: int) -> None:
    """Save, and continue like a training loop, which never waits."""
    checkpoints.save(step, STATE, {})
    end = time.monotonic() + 300
    while time.monotonic() < end:
        checkpoints.check()
        time.sleep(0.01)


def test_too_little_space_is_found_before_training(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    check_writable(tmp_path / "new" / "checkpoints", free // 2)
    with pytest.raises(CheckpointError, match=r"its disk has .* free: make room.*checkpoint.keep"):
        check_writable(tmp_path, 2 * free)


def test_only_checkpoints_that_will_be_saved_need_space(tmp_path: Path):
    third = {"w": jax.ShapeDtypeStruct((shutil.disk_usage(tmp_path).free // 3,), jnp.uint8)}
    with pytest.raises(CheckpointError, match=r"lower checkpoint\.keep"):
        CheckpointManager(tmp_path, keep=3).check_room(third, saves=4)
    CheckpointManager(tmp_path, keep=3).check_room(third, saves=2)
    cases = [(0, 10, 5), (0, 11, 5), (5, 11, 5), (10, 10, 5), (0, 3, 5), (0, 100, 0)]
    for first, last, every in cases:
        saved = [s for s in range(first + 1, last + 1) if s == last or (every and s % every == 0)]
        assert count_saves(first, last, every) == len(saved), (first, last, every)


def test_an_unwritable_disk_is_found_before_training(tmp_path: Path):
    refused = pytest.raises(CheckpointError, match=r"cannot be written \(File too large\)")
    with files_of_at_most(0), refused:
        check_writable(tmp_path, 1)


def test_a_failed_write_is_raised_by_wait(tmp_path: Path, capfd):
    with files_of_at_most(100_000):
        checkpoints = CheckpointManager(tmp_path)
        checkpoints.save(1, {"step": jnp.int32(1)}, {})
        checkpoints.wait()
        with pytest.raises(CheckpointError) as refusal:
            save_and_wait(checkpoints, 2)
        message = str(refusal.value)
        assert "checkpoint 2 could not be written" in message
        assert "it takes 886kB" in message
        assert message.endswith("and run again: it resumes from step 1.")
        assert len(message) < 700
        assert checkpoints.steps() == [1], "a failed save is not listed"
        assert {p.name for p in tmp_path.iterdir()} <= {"1", "2.saving", lock.NAME}
        checkpoints.wait()  # raised only once
        checkpoints.close()
        assert {p.name for p in tmp_path.iterdir()} == {"1"}, "its space is freed"
        assert capfd.readouterr().err == ""


def test_a_failed_write_is_raised_by_the_next_call(tmp_path: Path):
    with files_of_at_most(100_000), CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="checkpoint 1 could not be written"):
            save_and_check(checkpoints, 1)
        checkpoints.save(2, {"step": jnp.int32(2)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2]


@pytest.mark.parametrize(
    ("hurt", "mend", "words"),
    [
        (lambda d: d.chmod(0o555), lambda d: d.chmod(0o755), "Write permission is missing"),
        (lambda d: _swap(d), lambda d: _swap(d, back=True),
            "A file is where a directory is needed"),
    ],
    ids=["permission", "a file"],
)  # fmt: skip
def test_a_refused_save_names_the_cause(hurt, mend, words, tmp_path: Path):
    directory = tmp_path / "checkpoints"
    with CheckpointManager(directory) as checkpoints:
        save_and_wait(checkpoints, 1)
        hurt(directory)
        with permissions_hold(), pytest.raises(SaveError, match=words) as refusal:
            save_and_wait(checkpoints, 2)
        assert not refusal.value.room, "deletions would not help"
        mend(directory)
        save_and_wait(checkpoints, 3)
        assert checkpoints.newest() == 3


def _swap(directory: Path, *, back: bool = False) -> None:
    moved = directory.with_name("moved")
    if back:
        directory.unlink()
        moved.rename(directory)
    else:
        directory.rename(moved)
        directory.write_text("in the way")


def test_a_failed_announcement_is_no_failed_save(tmp_path: Path):
    def refused(step: int) -> None:
        raise PermissionError(13, "Permission denied", f"{tmp_path}/run.json")

    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(36, STATE, {}, sealed=refused)
        with pytest.raises(SaveError, match=r"checkpoint 36 is saved .*resumes from step 36\."):
            checkpoints.wait()
        assert checkpoints.steps() == [36]


def test_a_failed_second_save_leaves_the_first(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        save_and_wait(checkpoints, 1)
        with files_of_at_most(20_000), pytest.raises(SaveError, match="as it was saved before"):
            save_and_wait(checkpoints, 1)
        assert same_bits(checkpoints.restore(1, like(STATE)), STATE)


@pytest.mark.parametrize(
    ("error", "words", "room"),
    [
        (OSError(28, "No space left on device"), "Make room or lower checkpoint.keep", True),
        (ValueError("RESOURCE_EXHAUSTED: ... [OS error 28: ENOSPC]"), "Make room", True),
        (OSError(122, "Disk quota exceeded"), "quota is used up", True),
        (OSError(30, "Read-only file system"), "mounted read-only", False),
        (ValueError("PERMISSION_DENIED: Error opening x"), "Write permission is missing", False),
        (OSError(5, "Input/output error"), "The device fails", False),
        (ValueError("what nobody has seen"), "Check the location (ls -ld /x; df -h /x)", False),
    ],
)
def test_each_error_has_its_own_advice(error, words, room):
    found = disk_advice(error, Path("/x"))
    assert words in found.words
    assert found.room == room
