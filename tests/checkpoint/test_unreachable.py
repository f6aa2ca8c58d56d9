"""An error of the system is not damage: it is waited for, and no checkpoint loses its name."""

import errno
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from faulty_disks import Disk, permissions_hold

from jtrain.checkpoint import CheckpointManager, inspect, layout, storage
from jtrain.checkpoint.lock import WriteLock
from jtrain.errors import FAULT, UnreachableError
from jtrain.io import disk_errors

PASSING = ("ESTALE", "EMFILE", "EIO", "ETIMEDOUT")
STATE = {"w": jnp.arange(64.0), "step": jnp.int32(2)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with CheckpointManager(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {})
    return directory


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of waits, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(disk_errors, "sleep", found.append)
    return found


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name != ".writer")


@pytest.mark.parametrize(
    ("ending", "name"),
    [("/checkpoints", "ESTALE"), ("/2", "EMFILE"), ("seal.json", "EIO"), ("/d", "ETIMEDOUT")],
)
def test_an_error_that_passes_is_waited_for(name, ending, place, waits, monkeypatch):
    with CheckpointManager(place) as checkpoints:
        checkpoints.acquire()
        with monkeypatch.context() as patch:
            Disk(patch, ending, getattr(errno, name), times=2)
            assert checkpoints.resume() == 2
        assert checkpoints.notices == []
    assert names(place) == ["1", "2"]
    assert waits == list(disk_errors.WAITS[: len(waits)]) != []


@pytest.mark.parametrize(
    ("name", "fall_back"), [("ESTALE", True), ("EIO", False), ("EACCES", True), ("EUCLEAN", False)]
)
def test_an_error_that_stays_ends_the_run_and_renames_nothing(
    name, fall_back, place, waits, monkeypatch
):
    with CheckpointManager(place, fall_back=fall_back) as checkpoints:
        checkpoints.acquire()
        with monkeypatch.context() as patch:
            Disk(patch, "seal.json", getattr(errno, name), times=float("inf"))
            with pytest.raises(UnreachableError) as refusal:
                checkpoints.resume()
    assert refusal.value.code == FAULT
    assert names(place) == ["1", "2"]
    assert waits == (list(disk_errors.WAITS) if name in PASSING else [])


def test_a_checkpoint_that_may_not_be_read_stays_and_the_advice_makes_it_readable(place, waits):
    (place / "2").chmod(0)
    with permissions_hold(), CheckpointManager(place) as checkpoints:
        with pytest.raises(UnreachableError) as refusal:
            checkpoints.resume()
        command = str(refusal.value).partition("(chmod ")[2].partition(")")[0]
        mode, path = command.removeprefix("-R ").split()
        assert (mode, path) == ("u+rwX", str(place))
        (place / "2").chmod(0o700)
        assert checkpoints.resume() == 2


def away(place: Path) -> None:
    """Unmount: a bare folder is in the place of the share."""
    place.rename(place.with_name("share"))
    place.mkdir()


def back(place: Path) -> None:
    shutil.rmtree(place)
    place.with_name("share").rename(place)


def test_a_share_that_goes_away_after_the_resume_is_no_missing_checkpoint(place, waits):
    with CheckpointManager(place) as checkpoints:
        assert checkpoints.resume() == 2
        away(place)
        for read in (checkpoints.about, lambda step: checkpoints.restore(step, STATE)):
            with pytest.raises(UnreachableError, match="its file system is away"):
                read(2)
        back(place)
        assert checkpoints.about(2) == {}


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_share_that_is_away_begins_no_new_run(when, comes_back, place, monkeypatch):
    found = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        if comes_back and len(found) == 3:
            back(place)

    monkeypatch.setattr(disk_errors, "sleep", sleep)
    checkpoints = CheckpointManager(place)
    checkpoints.acquire()
    if when == "before":
        away(place)
    else:
        whole, calls = layout.find_faults, iter([lambda: away(place)])
        look = lambda *args, **kwargs: (next(calls, int)(), whole(*args, **kwargs))[1]
        monkeypatch.setattr(layout, "find_faults", look)
    if comes_back:
        assert checkpoints.resume() == 2
    else:
        with pytest.raises(UnreachableError, match="its file system is away"):
            checkpoints.resume()
        back(place)
    checkpoints.close()
    assert names(place) == ["1", "2"]


def test_nothing_is_deleted_for_an_error_of_the_system(place, waits, monkeypatch):
    Disk(monkeypatch, "seal.json", errno.ESTALE, times=float("inf"))
    for remove in (inspect.remove_damaged, lambda path: inspect.remove_checkpoints(path, 2)):
        with pytest.raises(UnreachableError):
            remove(place)
    assert names(place) == ["1", "2"]


TENSORSTORE = (
    'ABORTED: Error opening "zarr" driver: Error reading "a/.zarray" in OCDBT database at local '
    'file "state/": Failed to open: "state/d/56f2": {words} [os_error_code=\'{number}\'] '
    "[source locations='tensorstore/internal/file_io_concurrency.cc:1']"
)


@pytest.mark.thorough
def test_what_tensorstore_says_of_an_error_of_the_system(place, waits, monkeypatch):
    import orbax.checkpoint as ocp

    number = errno.ESTALE
    text = TENSORSTORE.format(words=os.strerror(number), number=number)
    true, errors = ocp.Checkpointer.restore, [ValueError(text)] * 2

    def restore(*args, **kwargs):
        if errors:
            raise errors.pop()
        return true(*args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore)
    restored = CheckpointManager(place).restore(2, STATE)
    np.testing.assert_array_equal(restored["w"], STATE["w"])
    assert waits == list(disk_errors.WAITS[:2])
    errors += [ValueError(text)] * 100
    with pytest.raises(UnreachableError):
        CheckpointManager(place).restore(2, STATE)
    errors[:] = [ValueError("NOT_FOUND: " + TENSORSTORE.format(words="x", number=errno.ENOENT))]
    with pytest.raises(storage.UnreadableError):
        storage.read(place / "2" / "state", {"['w']": STATE["w"]})


@pytest.mark.parametrize("ending", [".writer", "/checkpoints"])
def test_a_lock_that_cannot_be_taken_now_is_taken_later(ending, place, waits, monkeypatch):
    disk = Disk(monkeypatch, ending, errno.ESTALE, times=3)
    WriteLock(place).release()
    disk.times = float("inf")
    with pytest.raises(UnreachableError) as refusal:
        WriteLock(place)
    assert refusal.value.code == FAULT
    assert waits[-len(disk_errors.WAITS) :] == list(disk_errors.WAITS)
