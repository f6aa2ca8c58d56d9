"""System errors of saves and deletions are reported with specific advice."""

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from full_disk import files_of_at_most
from permissions import permissions_hold

from jtrain.checkpoint import CheckpointManager, SaveRetries, inspect
from jtrain.checkpoint.save_errors import SaveError
from jtrain.cli import main
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.write_safetensors import write_safetensors

STATE = {"x": jnp.arange(100_000.0)}


def save(checkpoints: CheckpointManager, step: int, sealed=lambda step: None) -> None:
    checkpoints.save(step, STATE, {}, sealed=sealed)
    checkpoints.wait()


def lock_files(checkpoint: Path) -> None:
    """Make the files of a checkpoint undeletable."""
    (checkpoint / "state").chmod(0o555)


def unlock_files(directory: Path) -> None:
    for path in directory.rglob("state"):
        path.chmod(0o755)


def test_a_save_succeeds_if_an_older_one_cannot_be_deleted(tmp_path: Path):
    told: list[str] = []
    with permissions_hold(), CheckpointManager(tmp_path, keep=1) as checkpoints:
        retries = SaveRetries(checkpoints, told.append)
        save(checkpoints, 1)
        lock_files(tmp_path / "1")
        for step in (2, 3, 4):
            retries.save(step, STATE, {})
            retries.settle()
        assert checkpoints.newest() == 4
        assert checkpoints.steps() == [4]
    (line,) = told
    assert line.startswith(f"{tmp_path / '1.deleting'} cannot be removed (Permission denied: ")
    assert "chmod u+rwx" in line
    assert "room" not in line
    unlock_files(tmp_path)


@pytest.mark.parametrize("how", ["permission", "a file", "too large"])
def test_a_refused_save_names_the_cause(how: str, tmp_path: Path):
    directory = tmp_path / "checkpoints"
    words, hurt, mend = {
        "permission": (
            "Write permission is missing",
            lambda: directory.chmod(0o555),
            lambda: directory.chmod(0o755),
        ),
        "a file": (
            "A file is where a directory is needed",
            lambda: _swap(directory),
            lambda: _swap(directory, back=True),
        ),
        "too large": ("raise the limit (ulimit -f)", lambda: None, lambda: None),
    }[how]
    most = 20_000 if how == "too large" else 10**9
    with CheckpointManager(directory) as checkpoints:
        save(checkpoints, 1)
        hurt()
        refused = pytest.raises(SaveError)
        with permissions_hold(), files_of_at_most(most), refused as refusal:
            save(checkpoints, 2)
        message = str(refusal.value)
        assert words in message
        assert "ake room" not in message
        assert " free" not in message, "the free space is irrelevant"
        assert not refusal.value.room, "deletions would not help"
        mend()
        save(checkpoints, 3)
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
        with pytest.raises(SaveError) as refusal:
            save(checkpoints, 36, refused)
        message = str(refusal.value)
        assert message.startswith(
            f"checkpoint 36 is saved in {tmp_path}/checkpoints, and {tmp_path}/"
        )
        assert "run.json could not be written after it (PermissionError" in message
        assert message.endswith("run again: it resumes from step 36.")
        assert checkpoints.steps() == [36]


def test_a_failed_second_save_leaves_the_first(tmp_path: Path):
    with CheckpointManager(tmp_path) as checkpoints:
        save(checkpoints, 1)
        with files_of_at_most(20_000), pytest.raises(SaveError) as refusal:
            save(checkpoints, 1)
        assert str(refusal.value).endswith("it resumes from step 1, as it was saved before.")


@pytest.mark.parametrize("arguments", [("--step", "1"), ("--damaged",)])
def test_ckpt_rm_names_the_system_error(arguments, tmp_path: Path, capfd):
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    shutil.copytree(tmp_path / "checkpoints/1", tmp_path / "checkpoints/0.damaged")
    for path in (tmp_path / "checkpoints").glob("[0-9]*"):
        lock_files(path)
    with permissions_hold():
        assert main(["ckpt", "rm", str(tmp_path), *arguments]) == 2
    err = capfd.readouterr().err
    assert "cannot be deleted" in err
    assert "(Permission denied: " in err
    assert "Write permission is missing: check the owner" in err
    assert "Traceback" not in err
    unlock_files(tmp_path)
    assert main(["ckpt", "rm", str(tmp_path), "--step", "2", "--force"]) == 0


def test_a_refused_rename_is_reported(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder whose entries may be read and not renamed")
    with CheckpointManager(tmp_path) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    for path in (tmp_path, tmp_path / "1"):
        os.chown(path, 65534, -1)
    tmp_path.chmod(0o1777)
    refused = pytest.raises(
        CheckpointError, match=r"cannot be deleted \(Operation not permitted: .*/1\)"
    )
    with permissions_hold(), refused:
        inspect.remove_checkpoints(tmp_path, 1)
    assert inspect.remove_checkpoints(tmp_path, 1) > 0


@pytest.mark.parametrize(
    ("error", "words", "room"),
    [
        (OSError(28, "No space left on device"), "Make room or lower checkpoint.keep", True),
        (ValueError("RESOURCE_EXHAUSTED: ... [OS error 28: ENOSPC]"), "Make room", True),
        (ValueError("RESOURCE_EXHAUSTED: Error writing: File too large"), "ulimit -f", False),
        (OSError(122, "Disk quota exceeded"), "quota is used up", True),
        (OSError(30, "Read-only file system"), "mounted read-only", False),
        (ValueError("PERMISSION_DENIED: Error opening x"), "Write permission is missing", False),
        (OSError(20, "Not a directory"), "A file is where a directory", False),
        (OSError(21, "Is a directory"), "A file is needed and something else", False),
        (OSError(5, "Input/output error"), "The device fails", False),
        (OSError(24, "Too many open files"), "ulimit -n", False),
        (OSError(2, "No such file or directory"), "was moved or removed", False),
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


def test_a_refused_export_names_no_flag_of_a_command(tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/a.bin is no .* Name it .*/a.safetens"):
        write_safetensors(tmp_path / "a.bin", {}, {})
    path, wide = tmp_path / "a.safetensors", np.ones(1, np.complex128)
    with pytest.raises(CheckpointError, match=r"x is complex128.* or leave it out\.$"):
        write_safetensors(path, {"x": wide}, {})
