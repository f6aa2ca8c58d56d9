"""A full, unwritable or failing disk is found before training, or at the next call, with advice."""

import gc
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import like, same_bits
from full_disk import files_of_at_most
from permissions import permissions_hold

from jtrain.checkpoint import CheckpointManager, check_writable, lock
from jtrain.checkpoint.orbax_logging import hide_failures
from jtrain.checkpoint.retention import count_saves
from jtrain.checkpoint.save_errors import SaveError
from jtrain.cli import main
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.safetensors import write_safetensors

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


@pytest.mark.thorough
def test_the_same_manager_saves_again_after_space_is_freed(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        with files_of_at_most(100_000), pytest.raises(CheckpointError, match="raise the limit"):
            save_and_wait(checkpoints, 1)
        for step in (2, 3):
            checkpoints.save(step, STATE, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        assert same_bits(checkpoints.restore(3, like(STATE)), STATE)


@pytest.mark.parametrize(
    ("hurt", "mend", "words"),
    [
        (lambda d: d.chmod(0o555), lambda d: d.chmod(0o755), "Write permission is missing"),
        (
            lambda d: _swap(d),
            lambda d: _swap(d, back=True),
            "A file is where a directory is needed",
        ),
    ],
    ids=["permission", "a file"],
)
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


def test_ckpt_rm_names_the_system_error(tmp_path: Path, capfd):
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        save_and_wait(checkpoints, 1)
        save_and_wait(checkpoints, 2)
    state = tmp_path / "checkpoints" / "1" / "state"
    state.chmod(0o555)
    with permissions_hold():
        assert main(["ckpt", "rm", str(tmp_path), "--step", "1"]) == 2
    err = capfd.readouterr().err
    assert "(Permission denied: " in err
    assert "Write permission is missing: check the owner" in err
    for path in tmp_path.rglob("state"):
        path.chmod(0o755)
    assert main(["ckpt", "rm", str(tmp_path), "--step", "2", "--force"]) == 0


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


def test_a_refused_export_names_the_cause(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="A file is where a directory is needed"):
        write_safetensors(tmp_path / "file" / "a.safetensors", {}, {})
    with pytest.raises(
        CheckpointError, match="A file is needed and something else is in its place"
    ):
        write_safetensors(tmp_path / "folder.safetensors", {}, {})
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_only_messages_of_orbax_are_hidden(caplog: pytest.LogCaptureFixture):
    hide_failures()
    log = logging.getLogger("asyncio")
    text = (
        'OUT_OF_RANGE: Error writing "w/0.0" in OCDBT database at local file "kept": File too large'
    )
    for error in (ValueError(text), ValueError("mine"), OSError("Error writing mine")):
        log.error("Future exception was never retrieved", exc_info=(type(error), error, None))
    lost = "Task was destroyed but it is pending! task: <Task coro=<f() at /site/{}/x.py:9>>"
    for whose in ("orbax/checkpoint", "mine"):
        log.error(lost.format(whose))
    told = [f"{record.exc_info[1] if record.exc_info else record.msg}" for record in caplog.records]
    assert told == ["mine", "Error writing mine", lost.format("mine")]
