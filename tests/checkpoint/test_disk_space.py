"""A full or unwritable disk is found before training, or at the next call."""

import gc
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import like, same_bits
from full_disk import files_of_at_most

from jtrain.checkpoint import CheckpointManager, check_writable, lock, state_bytes
from jtrain.checkpoint.disk_space import disk_bytes, format_bytes
from jtrain.checkpoint.retention import count_saves
from jtrain.errors import CheckpointError

# Failed tasks of the storage library sometimes log when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect failed tasks in this file, not in the test of another file."""
    yield
    gc.collect()


STATE = {"w": jnp.arange(200_000.0), "step": jnp.int32(1)}


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (999_499, "999 kB"), (999_999, "1 MB"), (10**9, "1 GB")],
)
def test_bytes_are_three_digits_and_a_unit(count: int, text: str):
    assert format_bytes(count) == text


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


def test_bytes_are_those_of_the_leaves():
    state = {"a": jnp.zeros((3, 5)), "b": jnp.zeros(7, jnp.bfloat16), "key": jax.random.key(0)}
    assert state_bytes(state) == 3 * 5 * 4 + 7 * 2 + 8
    assert state_bytes(jax.eval_shape(lambda: state)) == state_bytes(state)


def test_a_checkpoint_takes_about_the_bytes_of_its_state(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
    taken = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert state_bytes(STATE) <= taken < state_bytes(STATE) + 20_000


def test_disk_usage_of_a_tiny_checkpoint_is_estimated(tmp_path: Path):
    state = {f"w{i}": jnp.zeros(3) for i in range(8)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    blocks = sum(path.stat().st_blocks * 512 for path in (tmp_path / "1").rglob("*"))
    assert state_bytes(state) < blocks < disk_bytes(state) < 2 * blocks


def test_too_little_space_is_found_before_training(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    check_writable(tmp_path / "new" / "checkpoints", free // 2)
    with pytest.raises(CheckpointError, match=r"its disk has .* free: make room.*checkpoint.keep"):
        check_writable(tmp_path, 2 * free)


def test_the_advice_to_lower_keep_works(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    third = jax.ShapeDtypeStruct((free // 3,), jnp.uint8)
    with pytest.raises(CheckpointError, match=r"lower checkpoint\.keep"):
        CheckpointManager(tmp_path, keep=3).check_room({"w": third})
    CheckpointManager(tmp_path, keep=1).check_room({"w": third})


def test_only_checkpoints_that_will_be_saved_need_space(tmp_path: Path):
    third = {"w": jax.ShapeDtypeStruct((shutil.disk_usage(tmp_path).free // 3,), jnp.uint8)}
    with pytest.raises(CheckpointError, match=r"lower checkpoint\.keep"):
        CheckpointManager(tmp_path, keep=3).check_room(third, saves=4)
    CheckpointManager(tmp_path, keep=3).check_room(third, saves=2)
    cases = [(0, 10, 5), (0, 11, 5), (5, 11, 5), (10, 10, 5), (0, 3, 5), (0, 100, 0)]
    for first, last, every in cases:
        saved = [s for s in range(first + 1, last + 1) if s == last or (every and s % every == 0)]
        assert count_saves(first, last, every) == len(saved), (first, last, every)


def test_an_uncreatable_directory_is_found_before_training(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        CheckpointError, match=r"\(Not a directory\)\. A file is where a directory is"
    ):
        check_writable(tmp_path / "file" / "checkpoints", 1)
    check_writable(tmp_path / "another" / "checkpoints", 1)


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
        assert "it takes 886 kB" in message
        assert message.endswith("and run again: it resumes from step 1.")
        assert len(message) < 700
        assert checkpoints.steps() == [1], "a failed save is not listed"
        assert {p.name for p in tmp_path.iterdir()} <= {"1", "2.saving", lock.NAME}
        checkpoints.wait()  # raised only once
        checkpoints.close()
        assert {p.name for p in tmp_path.iterdir()} == {"1"}, "its space is freed"
        assert capfd.readouterr().err == ""


def test_what_a_thread_writes_after_a_failed_save_is_removed_too(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        with files_of_at_most(100_000), pytest.raises(CheckpointError):
            save_and_wait(checkpoints, 1)
        (tmp_path / "1.saving" / "state").mkdir(parents=True, exist_ok=True)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_raised_by_the_next_call(tmp_path: Path):
    with files_of_at_most(100_000), CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="checkpoint 1 could not be written"):
            save_and_check(checkpoints, 1)
        checkpoints.save(2, {"step": jnp.int32(2)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_the_same_manager_saves_again_after_space_is_freed(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        with files_of_at_most(100_000), pytest.raises(CheckpointError, match="raise the limit"):
            save_and_wait(checkpoints, 1)
        for step in (2, 3):
            checkpoints.save(step, STATE, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        assert same_bits(checkpoints.restore(3, like(STATE)), STATE)
