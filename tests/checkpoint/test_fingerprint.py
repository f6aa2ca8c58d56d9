"""A fingerprint depends only on the values of a leaf, and replicas that differ are found by it."""

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import like, same_bits
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.checkpoint import CheckpointManager, layout, seal
from jtrain.errors import CheckpointError, DamagedError, DeviceError
from jtrain.parallel import fingerprint


def of(leaf) -> str:
    return fingerprint.read(fingerprint.start({"leaf": leaf}))["leaf"]


def by_hand(words: list[int]) -> str:
    """Compute the sums in Python's own integers."""
    full, sums = 2**32 - 1, [0, 0]
    for place, word in enumerate(words):
        at = place * 0x9E3779B1 & full
        x = word ^ at
        x = (x ^ x >> 16) * 0x85EBCA6B & full
        x = (x ^ x >> 13) * 0xC2B2AE35 & full
        x ^= x >> 16
        y = (x ^ at >> 7) * 0x27D4EB2F & full
        sums = [(sums[0] + x) & full, (sums[1] + (y ^ y >> 15)) & full]
    return f"{sums[0]:08x}{sums[1]:08x}"


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "complex64", "int4"])
def test_is_the_same_on_a_device_and_on_the_host_for_every_type(dtype: str):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)) * 5, jnp.float32)
    leaf = values.astype(dtype)
    assert of(leaf) == of(np.asarray(leaf))
    row, column = np.argwhere(np.asarray(leaf.astype("complex64")))[0]
    assert of(leaf) != of(leaf.at[row, column].set(jnp.zeros((), dtype)))


@pytest.mark.thorough
def test_a_state_of_64_bits_is_restored(tmp_path: Path):
    with jax.enable_x64(True), CheckpointManager(tmp_path) as checkpoints:
        state = {"x": jnp.arange(5.0) / 3, "n": jnp.arange(5) << 40}
        checkpoints.save(1, state, {})
        found = checkpoints.restore(1, like(state))
    assert same_bits(found, state)
    assert found["x"].dtype == "float64"


def test_equals_the_sums_in_python_integers():
    words = np.random.default_rng(0).integers(0, 2**32, (3, 4, 5), np.uint32)
    assert of(words) == of(jnp.asarray(words)) == by_hand(words.ravel().tolist())
    wide = np.arange(5, dtype=">i8") - 2
    assert of(wide) == by_hand(wide.astype("<i8").view("<u4").tolist())
    assert of(jnp.float32(1)) == by_hand([0x3F800000])
    assert of(np.zeros((0, 3))) == of(jnp.zeros((0, 3))) == "0" * 16


def test_is_the_same_under_any_sharding():
    leaf = jax.random.normal(jax.random.key(0), (16, 8, 4))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for spec in (("a",), (None, "b"), ("b", "a"), (("a", "b"),)):
        at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        assert of(jax.device_put(leaf, at)) == of(leaf)
    spec = jax.sharding.PartitionSpec("a")
    there = jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")
    assert of(jax.device_put(leaf, there)) == of(leaf)


def test_every_flipped_bit_and_every_swap_is_detected():
    leaf = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    draw, known = random.Random(0), of(leaf)
    seen = set()
    for _ in range(300):
        other = leaf.copy()
        other.view(np.uint32)[draw.randrange(2000)] ^= 1 << draw.randrange(32)
        seen.add(of(other))
    for _ in range(100):
        other, (i, j) = leaf.copy(), draw.sample(range(2000), 2)
        other[[i, j]] = other[[j, i]]
        seen.add(of(other))
    zeros = [of(np.zeros(n, np.float32)) for n in (1, 2, 2000)]
    assert known not in {*seen, *zeros}
    assert len(seen) == 400
    assert len(set(zeros)) == 3


@pytest.mark.thorough
def test_a_changed_leaf_is_named_though_its_files_are_valid(tmp_path: Path):
    state = {"a": jnp.arange(9.0), "b": jnp.arange(9.0) + 1, "c": jnp.float32(2)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, {**state, "b": state["b"].at[3].set(0)}, {})
        checkpoints.wait()
        about = tmp_path / "2" / "about.json"  # the values on the device were those of step 1
        said = json.loads(about.read_text())
        there = json.loads((tmp_path / "1" / "about.json").read_text())
        said["fingerprints"] = there["fingerprints"]
        about.write_text(json.dumps(said))
        seal.seal(tmp_path / "2", 2)
        assert layout.find_faults(tmp_path, 2, full=True) == []
    with CheckpointManager(tmp_path, fall_back=False) as checkpoints:
        assert checkpoints.resume() == 2
        with pytest.raises(DamagedError, match=r"checkpoint 2 in .* but b has .*on_damage is stop"):
            checkpoints.restore(2, like(state))
        assert checkpoints.steps() == [1, 2]
    with CheckpointManager(tmp_path) as checkpoints:
        for ask in (like(state), jax.tree.map(np.asarray, state)):
            with pytest.raises(CheckpointError) as refusal:
                checkpoints.restore(2, ask)
            message = str(refusal.value)
            assert "its files are valid, but b has the fingerprint" in message
            assert message.count("fingerprint") == 1, "a and c are unchanged"
        assert checkpoints.resume() == 2
        with pytest.raises(CheckpointError, match=r"it was set aside as .*2\.damaged\. There are"):
            checkpoints.restore(2, like(state))
        assert checkpoints.resume() == 1, "a run that trains does not use it again"


# How a leaf is sharded over 4 x 2 devices, and who is named when device 5 has a flipped bit.
SPLITS = {
    "copied everywhere": (P(), ["cpu:5"]),
    "rows over fsdp": (P("fsdp"), ["cpu:4", "cpu:5"]),
    "rows over data": (P("data"), ["cpu:1", "cpu:3", "cpu:5", "cpu:7"]),
}


def array_with_flip(spec: P, flipped: int | None) -> jax.Array:
    """Return 8 x 8 numbers of which one device has one bit flipped."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    sharding, whole = NamedSharding(mesh, spec), np.arange(64, dtype=np.float32).reshape(8, 8)
    parts = []
    for device, index in sharding.devices_indices_map(whole.shape).items():
        part = whole[index].copy()
        if device.id == flipped:
            part.view(np.uint32)[0, 0] ^= 1
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(whole.shape, sharding, parts)


@pytest.mark.parametrize(("spec", "named"), SPLITS.values(), ids=SPLITS)
def test_a_flipped_bit_in_one_replica(spec, named):
    found = fingerprint.local_prints(fingerprint.start({"w": array_with_flip(spec, 5)}))
    assert len(found["w"]) == 2
    odd = min(found["w"].values(), key=len)
    groups = [[name.split()[0] for name in group] for group in found["w"].values()]
    assert named in groups, odd
    with pytest.raises(DeviceError, match=r"step 7: .* w: .*cpu:"):
        fingerprint.check_replicas(found, 7)


@pytest.mark.thorough
def test_equal_replicas_are_accepted_and_a_leaf_that_differs_is_told_apart_beside_them():
    specs = [*(spec for spec, _ in SPLITS.values()), P("data", "fsdp")]
    single = jax.device_put(np.arange(4.0, dtype=np.float32), jax.devices()[3])
    equal = {f"{i}": array_with_flip(spec, None) for i, spec in enumerate(specs)}
    equal |= {"host": np.arange(3), "single": single}
    begun = fingerprint.start(equal)
    prints = fingerprint.local_prints(begun)
    assert fingerprint.check_replicas(prints, 7) == fingerprint.read(begun)
    found = fingerprint.local_prints(fingerprint.start({**equal, "w": array_with_flip(P(), 5)}))
    assert {name for name, prints in found.items() if len(prints) > 1} == {"w"}


@pytest.mark.thorough
def test_a_step_with_differing_replicas_is_not_saved(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": array_with_flip(P(), None)}, {})
        checkpoints.wait()
        checkpoints.save(2, {"w": array_with_flip(P(), 5)}, {})
        with pytest.raises(DeviceError, match="w: cpu:5 of process 0 of 8 devices"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".saving"]
