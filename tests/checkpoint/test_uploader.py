"""Copies of checkpoints in an object store are complete or absent, wherever copying stops."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import CheckpointManager, object_store_layout, seal
from jtrain.checkpoint.save_errors import SaveError, TakenError
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.errors import FAULT
from jtrain.io.object_store import ObjectStore


class Killed(BaseException):
    """Stand-in for a kill of the process."""


def state(step: int) -> dict:
    return {"w": jnp.full((3, 4), step, jnp.float32)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the directory of a run with checkpoints 1, 2 and 3."""
    run = tmp_path_factory.mktemp("runs") / "small"
    with CheckpointManager(run / "checkpoints", keep=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {"step": step})
    (run / "run.json").write_text('{"status": "running", "step": 3}')
    (run / "metrics.jsonl").write_text('{"step": 3}\n')
    (run / "link.txt").symlink_to("/etc/passwd")
    return run


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    pytest.importorskip("obstore")
    return ObjectStore(f"file://{tmp_path}/bucket/small")


def start_uploader(objects: ObjectStore, run: Path, **more) -> CheckpointUploader:
    uploader = CheckpointUploader(objects, run, **{"keep": 2, "best": lambda: None, **more})
    uploader.begin()
    return uploader


def read(run: Path) -> int:
    """Restore the newest step of a run, after verifying every byte, and return it."""
    with CheckpointManager(run / "checkpoints") as checkpoints:
        step = checkpoints.resume()
        assert step is not None
        like = {"w": np.zeros((3, 4), np.float32)}
        found = checkpoints.restore(step, like)["w"]
    assert (found == step).all()
    return step


def test_copies_are_valid_and_older_ones_are_removed(objects: ObjectStore, saved: Path, tmp_path):
    uploader = start_uploader(objects, saved)
    for step in (1, 2, 3):
        uploader.copy(step)
    uploader.finish(3)
    assert object_store_layout.list_copies(objects) == [2, 3]
    assert {"run.json", "metrics.jsonl"} == set(
        object_store_layout.run_files(objects.sizes())
    )  # and no link
    assert object_store_layout.fetch_newest(objects, tmp_path / "back") == (3, [])
    assert read(tmp_path / "back") == 3
    assert (tmp_path / "back" / "run.json").read_text() == (saved / "run.json").read_text()


def test_the_best_whose_copy_failed_is_copied_with_the_next(objects, saved, monkeypatch):
    uploader = start_uploader(objects, saved, keep=1, best=lambda: 2)
    uploader.copy(1)
    with monkeypatch.context() as patch:
        cut_off(objects, patch, 0, OSError("no route to the host"))
        uploader.copy(2)
    assert object_store_layout.list_copies(objects) == [1]
    uploader.copy(3)
    assert object_store_layout.list_copies(objects) == [2, 3]


def cut_off(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException
):
    """Drop every change of the store after the first `after`."""
    count = [0]

    def counted(change: Callable) -> Callable:
        def change_or_die(*args, **options):
            count[0] += 1
            if count[0] > after:
                raise error
            return change(*args, **options)

        return change_or_die

    for name in ("put", "delete"):
        monkeypatch.setattr(objects._store, name, counted(getattr(objects._store, name)))
    return count


@pytest.mark.thorough
def test_a_kill_before_any_change_leaves_a_valid_copy(objects, saved, tmp_path, monkeypatch):
    """Copy 3 over a store that has 1 and 2, killed before each change in turn."""
    after, ended = 0, False
    while not ended:
        with monkeypatch.context() as patch:
            fresh = ObjectStore(f"{objects.address}-{after}")
            uploader = start_uploader(fresh, saved)
            uploader.copy(1)
            uploader.copy(2)
            cut_off(fresh, patch, after, Killed())
            try:
                uploader.copy(3)
                ended = True
            except Killed:
                pass
        back = tmp_path / f"back-{after}"
        step, news = object_store_layout.fetch_newest(fresh, back)
        assert news == []
        assert step == read(back)
        assert step in (2, 3)
        again = start_uploader(fresh, saved)  # the next process
        again.copy(3)
        assert object_store_layout.list_copies(fresh) == [2, 3]
        assert list(object_store_layout.object_sizes(fresh)) == [2, 3]
        after += 1
    assert after > 15


def test_a_refused_copy_is_reported_and_copied_later(objects, saved, monkeypatch, caplog):
    uploader = start_uploader(objects, saved)
    uploader.copy(1)
    with monkeypatch.context() as patch:
        cut_off(objects, patch, 4, PermissionError("Access Denied"))
        uploader.copy(2)
        assert object_store_layout.list_copies(objects) == [1]
        (line,) = caplog.messages
        assert "checkpoint 2 is on this disk and was not copied" in line
        assert "AWS_ACCESS_KEY_ID" in line
        with pytest.raises(SaveError, match=r"checkpoint 2 is valid in .* and is not in") as raised:
            uploader.finish(2)
        assert raised.value.code == FAULT
    uploader.finish(2)
    assert object_store_layout.list_copies(objects) == [1, 2]


def test_a_checkpoint_that_an_earlier_process_did_not_copy_is_copied_at_the_end(objects, saved):
    start_uploader(objects, saved).copy(2)
    start_uploader(objects, saved).finish(3)
    assert object_store_layout.list_copies(objects) == [2, 3]


def test_a_later_process_takes_over_the_copies(objects: ObjectStore, saved: Path):
    first = start_uploader(objects, saved)
    first.copy(1)
    second = start_uploader(objects, saved)
    with pytest.raises(TakenError, match=r"has taken over the copies.*name=\.\.\.") as raised:
        first.copy(2)
    assert raised.value.code == FAULT
    second.copy(2)
    with pytest.raises(TakenError):
        first.finish(2)
    assert object_store_layout.list_copies(objects) == [1, 2]


def test_copies_after_a_rollback_point_are_removed(objects: ObjectStore, saved: Path):
    uploader = start_uploader(objects, saved)
    for step in (1, 3, 2):
        uploader.copy(step)
    assert object_store_layout.list_copies(objects) == [1, 2]


def test_a_damaged_copy_is_skipped_without_leftovers(objects: ObjectStore, saved: Path, tmp_path):
    uploader = start_uploader(objects, saved)
    uploader.copy(1)
    uploader.copy(2)
    name = next(n for n in objects.sizes("checkpoints/2") if "/d/" in n)
    content = bytearray(objects.read(name) or b"")
    content[-1] ^= 1
    objects.write(name, bytes(content))
    step, news = object_store_layout.fetch_newest(objects, tmp_path / "back")
    assert step == read(tmp_path / "back") == 1
    assert "checkpoint 2" in news[0]
    assert "its digest is" in news[0]
    assert sorted(path.name for path in (tmp_path / "back" / "checkpoints").iterdir()) == ["1"]


@pytest.mark.parametrize("outside", ["../../../out", "/tmp/out"])
def test_an_object_name_that_leads_outside_is_not_written(outside, objects, saved, tmp_path):
    start_uploader(objects, saved).copy(1)
    sizes = {**object_store_layout.object_sizes(objects)[1], outside: 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            object_store_layout,
            object_store_layout.object_sizes.__name__,
            lambda objects: {1: sizes},
        )
        assert object_store_layout.fetch(objects, 1, tmp_path / "checkpoints") == [
            f"{outside}: is not a file name of a checkpoint"
        ]
    assert not (tmp_path / "checkpoints" / "1").exists()


def test_the_seal_is_the_last_object_of_a_copy(objects: ObjectStore, saved: Path, monkeypatch):
    uploader, sent = start_uploader(objects, saved), []
    send = objects.send
    note = lambda file, name: (sent.append(name), send(file, name))[1]
    monkeypatch.setattr(objects, "send", note)
    uploader.copy(1)
    assert sent[-1] == f"checkpoints/1/{seal.SEAL}"
    known = json.loads((saved / "checkpoints" / "1" / seal.SEAL).read_text())["files"]
    assert {f"checkpoints/1/{name}" for name in known} < set(sent)
