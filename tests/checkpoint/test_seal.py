"""Whatever happens to a file of a checkpoint is seen, and what was whole is gone on with."""

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
    files_of,
    flip,
    flip_in_any_file,
    from_another_step,
    seen,
    swap,
    zero,
)
from jtrain.checkpoint import CheckpointManager, directory_entries, layout, seal
from jtrain.errors import CheckpointError, DamagedError

# What keeps all names and sizes is seen when the bytes are read, and not by listing.
QUIETLY = (flip, flip_in_any_file, zero, swap, from_another_step)
FORMATS = Path(__file__).with_name("formats")


def saved(directory: Path) -> dict:
    """Two steps in a directory; the state of the second."""
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
    """Two steps in a directory, and the state of the second."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, saved(directory)


@pytest.fixture
def hurt(whole, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return shutil.copytree(whole[0], tmp_path / "hurt")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_damage_is_seen(kind, hurt: Path):
    kept = shutil.copytree(hurt / "2", hurt.parent / "kept")
    assert layout.find_faults(hurt, 2, full=True) == []
    for seed in range(6):
        damage, found = seen(hurt, seed, kinds=(kind,))
        assert found, f"{damage} (seed {seed})"
        assert len(found[0]) < 300
        assert 2 not in layout.steps(hurt) or kind in QUIETLY, f"{damage} is listed"
        shutil.rmtree(hurt / "2")
        shutil.copytree(kept, hurt / "2")
    assert layout.find_faults(hurt, 1, full=True) == layout.find_faults(hurt, 2, full=True) == []


def test_a_flipped_bit_is_refused_with_its_file_and_nothing_is_read(hurt: Path, whole):
    path = next(path for path in files_of(hurt / "2") if path.parent.name == "d")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with CheckpointManager(hurt) as checkpoints:
        assert checkpoints.newest() == 2, "listing reads no bytes"
        with pytest.raises(CheckpointError) as refusal:
            checkpoints.restore(2, like(whole[1]))
    told = str(refusal.value)
    assert told.startswith(
        f"checkpoint 2 is damaged: {path.relative_to(hurt / '2')}: its digest is"
    )
    assert "jtrain eval takes --step 1" in told


def test_each_damaged_step_is_set_aside_in_a_line_and_the_newest_whole_one_taken(hurt: Path, whole):
    for step in (3, 4):
        shutil.copytree(hurt / "2", hurt / str(step))  # their seals are those of step 2
    (hurt / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    with CheckpointManager(hurt) as checkpoints:
        assert checkpoints.resume() == 1
        assert [line.split(":")[0] for line in checkpoints.notices] == [
            f"checkpoint {step} is damaged and was set aside as {hurt / f'{step}.damaged'}"
            for step in (4, 3, 2)
        ]
        assert checkpoints.steps() == [1]
        assert int(checkpoints.restore(1, like(whole[1]))["step"]) == 1
        for step in (2, 3):
            checkpoints.save(step, {"x": jnp.int32(step)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3], "those that are kept"
    assert {path.name for path in hurt.glob("*.damaged")} == {"2.damaged", "3.damaged", "4.damaged"}
    (hurt / "3" / "about.json").unlink()
    with CheckpointManager(hurt) as checkpoints:
        assert checkpoints.resume() == 2
    assert (hurt / "3.damaged-2").is_dir(), "the first one is not overwritten"


def test_where_none_is_to_be_passed_over_the_newest_decides(hurt: Path):
    with CheckpointManager(hurt, fall_back=False) as checkpoints:
        assert checkpoints.resume() == 2
    (hurt / "1" / "state" / "manifest.ocdbt").write_bytes(b"")
    with CheckpointManager(hurt, fall_back=False) as checkpoints:
        assert checkpoints.resume() == 2, "an older one is not asked for"
    (hurt / "2" / "about.json").unlink()
    refused = pytest.raises(DamagedError, match=r"damaged: about\.json.* nothing was renamed")
    with CheckpointManager(hurt, fall_back=False) as checkpoints, refused:
        checkpoints.resume()
    assert {path.name for path in hurt.iterdir()} == {"1", "2"}
    shutil.rmtree(hurt)
    with CheckpointManager(hurt, fall_back=False) as checkpoints:
        assert checkpoints.resume() is None


def test_where_all_are_damaged_nothing_is_deleted(hurt: Path):
    for step in (1, 2):
        (hurt / str(step) / "seal.json").write_text("{}")
    with CheckpointManager(hurt) as checkpoints:
        assert checkpoints.resume() is None
        assert len(checkpoints.notices) == 2
    assert sorted(path.name for path in hurt.iterdir()) == ["1.damaged", "2.damaged"]


def test_reading_takes_nothing_away(hurt: Path, whole):
    (hurt / "2" / "about.json").write_text("{}")
    before = sorted(path.name for path in hurt.iterdir())
    looking = CheckpointManager(hurt)
    assert looking.newest() == 1
    with pytest.raises(CheckpointError, match=r"checkpoint 2 is damaged: about\.json"):
        looking.restore(2, like(whole[1]))
    assert sorted(path.name for path in hurt.iterdir()) == before


def test_the_seal_is_written_after_all_is_on_the_disk(tmp_path: Path, monkeypatch):
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
    files = {f"1.saving/{path.relative_to(tmp_path / '1')}" for path in (tmp_path / "1").rglob("*")}
    last = ["1.saving/seal.json!", "1.saving/seal.json", "1.saving", "1.saving > 1", ".", "said"]
    assert events[-6:] == last
    assert set(events[:-6]) == {"1.saving/about.json!", *files} - {"1.saving/seal.json"}


def test_no_step_is_named_while_it_is_written(tmp_path: Path):
    named: list[tuple[int, list[int]]] = []
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            say = lambda step: named.append((step, layout.steps(tmp_path)))
            checkpoints.save(step, {"x": jnp.arange(1000)}, {}, sealed=say)
            assert checkpoints.newest() in (step, step - 1 or None)
    assert named == [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])]


def test_two_saves_of_one_state_have_one_seal_but_for_the_names(tmp_path: Path):
    """Else the digests would say nothing of the contents."""
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


def test_a_checkpoint_of_a_later_format_is_not_taken_for_damage(tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(seal, "FORMAT", 3)
        saved(tmp_path)
    with CheckpointManager(tmp_path) as checkpoints:
        for look in (checkpoints.newest, checkpoints.resume):
            with pytest.raises(CheckpointError, match=r"format 3 .* reads up to 2 .* pip install"):
                look()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"], "it is not set aside"


@pytest.mark.parametrize("version", [1, 2])
def test_every_format_there_ever_was_is_read(version: int, tmp_path: Path):
    directory = shutil.copytree(FORMATS / str(version), tmp_path / "old")
    state = {
        "params": {"kernel": jnp.arange(12.0).reshape(3, 4) / 7, "low": jnp.arange(5.0)},
        "rng": jax.random.key(7),
        "step": jnp.int32(3),
    }
    state["params"]["low"] = state["params"]["low"].astype(jnp.bfloat16)
    with CheckpointManager(directory) as checkpoints:
        assert checkpoints.resume() == 3
        assert checkpoints.about(3) == {"note": f"format {version}"}
        assert same_bits(checkpoints.restore(3, like(state)), state)
        checkpoints.save(4, state, {})
    assert layout.steps(directory) == [3, 4]
    cut = next(path for path in files_of(directory / "3") if path.parent.name == "d")
    cut.write_bytes(cut.read_bytes()[:-1])
    assert layout.steps(directory) == [4], "an old one is known by its sizes"


def test_a_digest_is_that_of_another_program(tmp_path: Path):
    """Of `xxhsum -H2`, and so of anything that speaks XXH3."""
    (tmp_path / "empty").write_bytes(b"")
    assert seal.digest(tmp_path / "empty") == "99aa06d3014798d86001c324468d497f"
    long = np.arange(3_000_000, dtype=np.uint8).tobytes()
    (tmp_path / "long").write_bytes(long)
    import xxhash

    assert seal.digest(tmp_path / "long") == xxhash.xxh3_128_hexdigest(long)


# What is no checkpoint, or cannot be read: passed over in words, and waited for by nobody.


def resealed(checkpoint: Path, **changes) -> None:
    """Writes a seal with other parts, whose own digest holds."""
    said = json.loads((checkpoint / "seal.json").read_text()) | changes
    said.pop("seal")
    (checkpoint / "seal.json").write_text(seal._text(said))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def made_folder(path: Path) -> None:
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
    "a seal that is a folder": lambda step: made_folder(step / "seal.json"),
    "no files": lambda step: resealed(step, files=None),
    "files of nothing": lambda step: resealed(step, files={"about.json": None}),
    "sizes of text": lambda step: resealed(step, files={"about.json": ["1", "2"]}),
    "a step of text": lambda step: resealed(step, step="2"),
    "a run of numbers": lambda step: resealed(step, run=3),
    "an about that is a pipe": lambda step: pipe(step / "about.json"),
    "an array that is a pipe": lambda step: pipe(next((step / "state" / "d").iterdir())),
    "an emptied folder": lambda step: (shutil.rmtree(step), step.mkdir()),
    "a file": lambda step: (shutil.rmtree(step), step.write_text("")),
    "a pipe": lambda step: (shutil.rmtree(step), os.mkfifo(step)),
    "a folder that may not be read": lambda step: step.chmod(0),
    "a file that may not be read": lambda step: (step / "seal.json").chmod(0),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_checkpoint_is_set_aside_in_words_for_the_one_before_it(kind, hurt: Path, whole):
    STRANGE[kind](hurt / "2")
    with permissions_hold():
        assert layout.steps(hurt) == [1]
        (fault,) = layout.find_faults(hurt, 2, full=True)[:1]
        assert len(fault) < 300
        with pytest.raises(DamagedError, match="checkpoint 2 is damaged: "):
            layout.check(hurt, 2)
        if not kind.startswith("an array"):
            with pytest.raises(DamagedError, match="checkpoint 2 is damaged: "):
                layout.record(hurt, 2)
        with CheckpointManager(hurt) as checkpoints:
            assert checkpoints.resume() == 1
            aside = f"checkpoint 2 is damaged and was set aside as {hurt / '2.damaged'}: {fault}"
            assert [line.startswith(aside) for line in checkpoints.notices] == [True]
            assert int(checkpoints.restore(1, like(whole[1]))["step"]) == 1
    if (hurt / "2.damaged").is_dir():
        (hurt / "2.damaged").chmod(0o700)


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
def test_a_record_of_other_types_is_told_though_its_seal_holds(change, hurt: Path, whole):
    about = hurt / "2" / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | change))
    seal.seal(hurt / "2", 2)
    with pytest.raises(CheckpointError):
        CheckpointManager(hurt).restore(2, like(whole[1]))
    assert CheckpointManager(hurt, best="loss").best() is None


def test_a_checkpoint_of_format_1_is_of_its_step_too(tmp_path: Path):
    shutil.copytree(FORMATS / "1", tmp_path / "old")
    (tmp_path / "old" / "3").rename(tmp_path / "old" / "4")
    assert layout.find_faults(tmp_path / "old", 4, full=True) == ["about.json: is of step 3"]


def test_a_checkpoint_under_another_name_is_named_and_not_gone_on_from(hurt: Path):
    (hurt / "2").rename(hurt / "2.bak")
    shutil.copytree(hurt / "1", hurt / "copy of 1")
    (hurt / "notes").mkdir()
    assert directory_entries.strays(hurt) == [("2.bak", 2), ("copy of 1", 1)]
    with CheckpointManager(hurt) as checkpoints:
        assert checkpoints.resume() == 1
    (line,) = checkpoints.notices
    assert f"checkpoint 2 lies in {hurt} as 2.bak" in line
    source, target = line.rpartition(": mv ")[2].split()
    Path(source).rename(target)
    with CheckpointManager(hurt) as checkpoints:
        assert checkpoints.resume() == 2


def test_where_the_system_refuses_to_set_a_damaged_one_aside_what_to_type_is_told(hurt: Path):
    (hurt / "2" / "seal.json").write_text("{}")
    if os.geteuid() == 0:  # nobody but their owner may rename what is in a sticky folder
        os.chown(hurt, 65534, -1)
        os.chown(hurt / "2", 65534, -1)
        hurt.chmod(0o1777)
    else:
        pytest.skip("only root can make a folder whose entries may be read and not renamed")
    checkpoints = CheckpointManager(hurt)
    checkpoints.acquire()
    with permissions_hold(), pytest.raises(DamagedError) as refusal:
        checkpoints.resume()
    assert "cannot be renamed to" in str(refusal.value)
    assert "refused (Operation not permitted)" in str(refusal.value)
    source, target = str(refusal.value).rpartition(": mv ")[2].split()
    Path(source).rename(target)
    assert checkpoints.resume() == 1
    checkpoints.close()
