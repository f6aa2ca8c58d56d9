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
from jtrain.checkpoint import CheckpointManager, layout, seal
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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_damage_is_detected(kind, damaged: Path):
    kept = shutil.copytree(damaged / "2", damaged.parent / "kept")
    assert layout.find_faults(damaged, 2, full=True) == []
    for seed in range(3):
        damage, found = damage_and_check(damaged, seed, kinds=(kind,))
        assert found, f"{damage} (seed {seed})"
        assert len(found[0]) < 300
        assert 2 not in layout.list_steps(damaged) or kind in QUIETLY, f"{damage} is listed"
        shutil.rmtree(damaged / "2")
        shutil.copytree(kept, damaged / "2")
    assert [layout.find_faults(damaged, step, full=True) for step in (1, 2)] == [[], []]


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


@pytest.mark.thorough
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
    "a seal without end": lambda step: os.truncate(step / "seal.json", 1 << 40),
    "a seal that is a folder": lambda step: make_folder(step / "seal.json"),
    "a seal of another step": lambda step: reseal(step, files={"../1/seal.json": [1, ""]}),
    "files of nothing": lambda step: reseal(step, files={"about.json": None}),
    "an about that is a pipe": lambda step: pipe(step / "about.json"),
    "an array that is a pipe": lambda step: pipe(next((step / "state" / "d").iterdir())),
    "a file": lambda step: (shutil.rmtree(step), step.write_text("")),
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
        {"leaves": None}, {"leaves": {"w": f"float32[{10**30}]"}}, {"fingerprints": []},
        {"best": {"name": "loss", "value": "low"}}, {"step": "2"},
    ],
)  # fmt: skip
def test_a_record_with_wrong_types_is_refused_despite_its_seal(change, damaged: Path, whole):
    about = damaged / "2" / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | change))
    seal.seal(damaged / "2", 2)
    with pytest.raises(CheckpointError):
        CheckpointManager(damaged).restore(2, like(whole[1]))
    assert CheckpointManager(damaged, best="loss").best() is None
