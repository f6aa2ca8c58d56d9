"""Any damage to a file of a checkpoint is detected, and a run resumes from the newest valid one."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import like, same_bits
from permissions import permissions_hold

from chaos.corruption import (
    KINDS,
    damage_and_check,
    files_of,
    flip,
    flip_in_any_file,
    from_another_step,
    swap,
    zero,
)
from jtrain.checkpoint import CheckpointManager, directory_entries, layout, seal
from jtrain.errors import CheckpointError, DamagedError

# Damage that keeps names and sizes is detected by reading the bytes, not by listing.
QUIETLY = (flip, flip_in_any_file, zero, swap, from_another_step)
FORMATS = Path(__file__).with_name("formats")


def saved(directory: Path) -> dict:
    """Save two steps in a directory; return the state of the second."""
    state = lambda step: {
        "w": jax.random.normal(jax.random.key(step), (64, 64)),
        "zeros": jnp.zeros((64, 64)),
        "step": jnp.int32(step),
        "rng": jax.random.key(step),
    }
    with CheckpointManager(directory) as checkpoints:
        checkpoints.save(1, state(1), {"step": 1})
        checkpoints.save(2, state(2), {"step": 2})
    return state(2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """Save two steps in a directory; return it and the state of the second."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, saved(directory)


@pytest.fixture
def damaged(whole, tmp_path: Path) -> Path:
    """Copy the two checkpoints, to be damaged."""
    return shutil.copytree(whole[0], tmp_path / "hurt")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_damage_is_detected(kind, damaged: Path):
    kept = shutil.copytree(damaged / "2", damaged.parent / "kept")
    assert layout.find_faults(damaged, 2, full=True) == []
    for seed in range(6):
        damage, found = damage_and_check(damaged, seed, kinds=(kind,))
        assert found, f"{damage} (seed {seed})"
        assert len(found[0]) < 300
        assert 2 not in layout.list_steps(damaged) or kind in QUIETLY, f"{damage} is listed"
        shutil.rmtree(damaged / "2")
        shutil.copytree(kept, damaged / "2")
    assert (
        layout.find_faults(damaged, 1, full=True) == layout.find_faults(damaged, 2, full=True) == []
    )


def test_a_flipped_bit_is_refused_with_the_name_of_its_file(damaged: Path, whole):
    path = next(path for path in files_of(damaged / "2") if path.parent.name == "d")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.newest() == 2, "listing reads no bytes"
        with pytest.raises(CheckpointError) as refusal:
            checkpoints.restore(2, like(whole[1]))
    told = str(refusal.value)
    assert told.startswith(
        f"checkpoint 2 is damaged: {path.relative_to(damaged / '2')}: its digest is"
    )
    assert "jtrain eval takes --step 1" in told


def test_resume_sets_damaged_steps_aside_and_takes_the_newest_valid(damaged: Path, whole):
    for step in (3, 4):
        shutil.copytree(damaged / "2", damaged / str(step))  # with the seals of step 2
    (damaged / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.resume() == 1
        assert [line.split(":")[0] for line in checkpoints.notices] == [
            f"checkpoint {step} is damaged and was set aside as {damaged / f'{step}.damaged'}"
            for step in (4, 3, 2)
        ]
        assert checkpoints.steps() == [1]
        assert int(checkpoints.restore(1, like(whole[1]))["step"]) == 1
        for step in (2, 3):
            checkpoints.save(step, {"x": jnp.int32(step)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3], "the retained ones"
    assert {path.name for path in damaged.glob("*.damaged")} == {
        "2.damaged",
        "3.damaged",
        "4.damaged",
    }
    (damaged / "3" / "about.json").unlink()
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.resume() == 2
    assert (damaged / "3.damaged-2").is_dir(), "the first one is not overwritten"


def test_without_fallback_the_newest_must_be_valid(damaged: Path):
    with CheckpointManager(damaged, fall_back=False) as checkpoints:
        assert checkpoints.resume() == 2
    (damaged / "1" / "state" / "manifest.ocdbt").write_bytes(b"")
    with CheckpointManager(damaged, fall_back=False) as checkpoints:
        assert checkpoints.resume() == 2, "older ones do not matter"
    (damaged / "2" / "about.json").unlink()
    refused = pytest.raises(DamagedError, match=r"damaged: about\.json.* nothing was renamed")
    with CheckpointManager(damaged, fall_back=False) as checkpoints, refused:
        checkpoints.resume()
    assert {path.name for path in damaged.iterdir()} == {"1", "2"}
    shutil.rmtree(damaged)
    with CheckpointManager(damaged, fall_back=False) as checkpoints:
        assert checkpoints.resume() is None


def test_if_all_are_damaged_nothing_is_deleted(damaged: Path):
    for step in (1, 2):
        (damaged / str(step) / "seal.json").write_text("{}")
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.resume() is None
        assert len(checkpoints.notices) == 2
    assert sorted(path.name for path in damaged.iterdir()) == ["1.damaged", "2.damaged"]


def test_reading_sets_nothing_aside(damaged: Path, whole):
    (damaged / "2" / "about.json").write_text("{}")
    before = sorted(path.name for path in damaged.iterdir())
    looking = CheckpointManager(damaged)
    assert looking.newest() == 1
    with pytest.raises(CheckpointError, match=r"checkpoint 2 is damaged: about\.json"):
        looking.restore(2, like(whole[1]))
    assert sorted(path.name for path in damaged.iterdir()) == before


def test_the_seal_is_written_after_all_files_are_flushed(tmp_path: Path, monkeypatch):
    events: list[str] = []
    sync, rename, write = seal.sync, Path.rename, Path.write_text
    told = lambda path: path.relative_to(tmp_path).as_posix()
    monkeypatch.setattr(seal, "sync", lambda path: (events.append(told(path)), sync(path)))
    monkeypatch.setattr(
        Path, "rename", lambda a, b: (events.append(f"{told(a)} > {told(b)}"), rename(a, b))[1]
    )
    monkeypatch.setattr(
        Path, "write_text", lambda p, *a, **k: (events.append(f"{told(p)}!"), write(p, *a, **k))[1]
    )
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(9)}, {}, sealed=lambda step: events.append("said"))
    # TensorStore removes its locks after it reports the end, or not if they are renamed by then.
    paths = [p for p in (tmp_path / "1").rglob("*") if not p.name.endswith(".__lock")]
    files = {f"1.saving/{path.relative_to(tmp_path / '1')}" for path in paths}
    last = ["1.saving/seal.json!", "1.saving/seal.json", "1.saving", "1.saving > 1", ".", "said"]
    assert events[-6:] == last
    assert set(events[:-6]) == {"1.saving/about.json!", *files} - {"1.saving/seal.json"}


def test_no_step_is_listed_while_it_is_written(tmp_path: Path):
    named: list[tuple[int, list[int]]] = []
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            say = lambda step: named.append((step, layout.list_steps(tmp_path)))
            checkpoints.save(step, {"x": jnp.arange(1000)}, {}, sealed=say)
            assert checkpoints.newest() in (step, step - 1 or None)
    assert named == [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])]


def test_two_saves_of_one_state_have_equal_digests(tmp_path: Path):
    """Different digests would say nothing about the contents."""
    state = {"x": jnp.arange(100.0)}
    for name in "ab":
        with CheckpointManager(tmp_path / name) as checkpoints:
            checkpoints.save(1, state, {})
    digests = [
        {
            kept[1]
            for kept in json.loads((tmp_path / n / "1/seal.json").read_text())["files"].values()
        }
        for n in "ab"
    ]
    assert len(digests[0] & digests[1]) >= 3


def test_a_later_format_is_no_damage(tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(seal, "FORMAT", 3)
        saved(tmp_path)
    with CheckpointManager(tmp_path) as checkpoints:
        for look in (checkpoints.newest, checkpoints.resume):
            with pytest.raises(CheckpointError, match=r"format 3 .* reads up to 2 .* pip install"):
                look()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"], "it is not set aside"


def test_the_format_on_the_disk_is_read(tmp_path: Path):
    directory = shutil.copytree(FORMATS / "2", tmp_path / "old")
    state = {
        "params": {"kernel": jnp.arange(12.0).reshape(3, 4) / 7, "low": jnp.arange(5.0)},
        "rng": jax.random.key(7),
        "step": jnp.int32(3),
    }
    state["params"]["low"] = state["params"]["low"].astype(jnp.bfloat16)
    with CheckpointManager(directory) as checkpoints:
        assert checkpoints.resume() == 3
        assert checkpoints.about(3) == {"note": "format 2"}
        assert same_bits(checkpoints.restore(3, like(state)), state)
        checkpoints.save(4, state, {})
    assert layout.list_steps(directory) == [3, 4]


def test_a_digest_equals_that_of_xxhsum(tmp_path: Path):
    """Compare with `xxhsum -H2`, and so with any other XXH3."""
    (tmp_path / "empty").write_bytes(b"")
    assert seal.digest(tmp_path / "empty") == "99aa06d3014798d86001c324468d497f"
    long = np.arange(3_000_000, dtype=np.uint8).tobytes()
    (tmp_path / "long").write_bytes(long)
    import xxhash

    assert seal.digest(tmp_path / "long") == xxhash.xxh3_128_hexdigest(long)


# Invalid or unreadable entries: skipped with a message, and without waiting.


def reseal(checkpoint: Path, **changes) -> None:
    """Rewrite a seal with other entries and a valid digest of its own."""
    said = json.loads((checkpoint / "seal.json").read_text()) | changes
    said.pop("seal")
    (checkpoint / "seal.json").write_text(seal._to_text(said))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DEEP = "[" * 100_000 + "]" * 100_000
STRANGE = {
    "a nested seal": lambda step: (step / "seal.json").write_text(f'{{"format": {DEEP}}}'),
    "a seal of null": lambda step: (step / "seal.json").write_text("null"),
    "a seal of a list": lambda step: (step / "seal.json").write_text("[1]"),
    "a seal that is not UTF-8": lambda step: (step / "seal.json").write_bytes(b'{"a": "\xff"}'),
    "a seal of 5,000 digits": lambda step: (step / "seal.json").write_text("1" * 5000),
    "a seal without end": lambda step: os.truncate(step / "seal.json", 1 << 40),
    "a seal that is a pipe": lambda step: pipe(step / "seal.json"),
    "a seal that is a folder": lambda step: make_folder(step / "seal.json"),
    "no files": lambda step: reseal(step, files=None),
    "files of nothing": lambda step: reseal(step, files={"about.json": None}),
    "sizes of text": lambda step: reseal(step, files={"about.json": ["1", "2"]}),
    "a step of text": lambda step: reseal(step, step="2"),
    "a run of numbers": lambda step: reseal(step, run=3),
    "an about that is a pipe": lambda step: pipe(step / "about.json"),
    "an array that is a pipe": lambda step: pipe(next((step / "state" / "d").iterdir())),
    "an emptied folder": lambda step: (shutil.rmtree(step), step.mkdir()),
    "a file": lambda step: (shutil.rmtree(step), step.write_text("")),
    "a pipe": lambda step: (shutil.rmtree(step), os.mkfifo(step)),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_resume_sets_invalid_entries_aside(kind, damaged: Path, whole):
    STRANGE[kind](damaged / "2")
    assert layout.list_steps(damaged) == [1]
    (fault,) = layout.find_faults(damaged, 2, full=True)[:1]
    assert len(fault) < 300
    with pytest.raises(DamagedError, match="checkpoint 2 is damaged: "):
        layout.check_valid(damaged, 2)
    if not kind.startswith("an array"):
        with pytest.raises(DamagedError, match="checkpoint 2 is damaged: "):
            layout.read_record(damaged, 2)
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.resume() == 1
        aside = f"checkpoint 2 is damaged and was set aside as {damaged / '2.damaged'}: {fault}"
        assert [line.startswith(aside) for line in checkpoints.notices] == [True]
        assert int(checkpoints.restore(1, like(whole[1]))["step"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"leaves": None},
        {"leaves": {"w": 3}},
        {"leaves": {"w": "float32[" + "[" * 10_000}},
        {"leaves": {"w": "float32[-1]"}},
        {"leaves": {"w": f"float32[{10**30}]"}},
        {"fingerprints": []},
        {"best": "loss"},
        {"best": {"name": "loss", "value": "low"}},
        {"about": None},
        {"step": "2"},
    ],
)
def test_a_record_with_wrong_types_is_refused_despite_its_seal(change, damaged: Path, whole):
    about = damaged / "2" / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | change))
    seal.seal(damaged / "2", 2)
    with pytest.raises(CheckpointError):
        CheckpointManager(damaged).restore(2, like(whole[1]))
    assert CheckpointManager(damaged, best="loss").best() is None


def test_a_renamed_checkpoint_is_reported_and_not_resumed_from(damaged: Path):
    (damaged / "2").rename(damaged / "2.bak")
    shutil.copytree(damaged / "1", damaged / "copy of 1")
    (damaged / "notes").mkdir()
    assert directory_entries.list_strays(damaged) == [("2.bak", 2), ("copy of 1", 1)]
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.resume() == 1
    (line,) = checkpoints.notices
    assert f"checkpoint 2 is in {damaged} under the name 2.bak" in line
    source, target = line.rpartition(": mv ")[2].split()
    Path(source).rename(target)
    with CheckpointManager(damaged) as checkpoints:
        assert checkpoints.resume() == 2


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_reported(damaged: Path):
    (damaged / "2" / "seal.json").write_text("{}")
    if os.geteuid() == 0:  # in a sticky folder only owners may rename
        os.chown(damaged, 65534, -1)
        os.chown(damaged / "2", 65534, -1)
        damaged.chmod(0o1777)
    else:
        pytest.skip("only root can make a folder whose entries may be read and not renamed")
    checkpoints = CheckpointManager(damaged)
    checkpoints.acquire()
    with permissions_hold(), pytest.raises(DamagedError) as refusal:
        checkpoints.resume()
    assert "cannot be renamed to" in str(refusal.value)
    assert "(Operation not permitted)" in str(refusal.value)
    source, target = str(refusal.value).rpartition(": mv ")[2].split()
    Path(source).rename(target)
    assert checkpoints.resume() == 1
    checkpoints.close()
