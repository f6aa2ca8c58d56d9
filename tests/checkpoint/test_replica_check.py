"""Replicas of a leaf that differ are detected at the next save, with the name of the device."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.checkpoint import CheckpointManager, fingerprint, replica_check
from jtrain.errors import DeviceError

# How a leaf is sharded over 4 x 2 devices, and who is named when device 5 has a flipped bit.
SPLITS = {
    "copied everywhere": (P(), ["cpu:5"]),
    "rows over fsdp": (P("fsdp"), ["cpu:4", "cpu:5"]),
    "columns over fsdp": (P(None, "fsdp"), ["cpu:4", "cpu:5"]),
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
    found = replica_check.local_prints(fingerprint.start({"w": array_with_flip(spec, 5)}))
    assert len(found["w"]) == 2
    odd = min(found["w"].values(), key=len)
    groups = [[name.split()[0] for name in group] for group in found["w"].values()]
    assert named in groups, odd
    with pytest.raises(DeviceError, match=r"step 7: .* w: .*cpu:"):
        replica_check.check_replicas(found, 7)


@pytest.mark.thorough
@pytest.mark.parametrize(("spec", "named"), SPLITS.values(), ids=SPLITS)
def test_leaves_of_one_program_are_reported_separately(spec, named):
    odd = array_with_flip(spec, 5)
    alone = replica_check.local_prints(fingerprint.start({"w": odd}))["w"]
    for beside in (P(), P("data"), P("data", "fsdp")):
        other = array_with_flip(beside, None)
        single = jax.device_put(np.arange(4.0, dtype=np.float32), jax.devices()[3])
        every = {"a": other, "w": odd, "host": np.arange(3), "b": other, "single": single}
        found = replica_check.local_prints(fingerprint.start(every))
        assert found.pop("w") == alone
        assert found.keys() == {"a", "b", "host", "single"}
        assert all(len(prints) == 1 for prints in found.values())
    assert named in [[name.split()[0] for name in group] for group in alone.values()]


@pytest.mark.parametrize("spec", [*(spec for spec, _ in SPLITS.values()), P("data", "fsdp")])
def test_equal_replicas_are_accepted(spec):
    begun = fingerprint.start({"w": array_with_flip(spec, None), "host": np.arange(3)})
    assert replica_check.check_replicas(replica_check.local_prints(begun), 7) == fingerprint.read(
        begun
    )


def test_a_step_with_differing_replicas_is_not_saved(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": array_with_flip(P(), None)}, {})
        checkpoints.wait()
        checkpoints.save(2, {"w": array_with_flip(P(), 5)}, {})
        with pytest.raises(DeviceError, match="w: cpu:5 of process 0 of 8 devices"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".saving"]


class Counted(list):
    """List of devices that counts how many are copied out of it, or beside it."""

    copies = 0

    def __iter__(self):
        Counted.copies += len(self)
        return super().__iter__()

    def __radd__(self, other):
        Counted.copies += len(other) + len(self)
        return Counted([*other, *list.__iter__(self)])


@pytest.mark.parametrize("hosts", [16, 256])
def test_merging_the_prints_of_all_hosts_copies_each_device_once(hosts, monkeypatch):
    monkeypatch.setattr(Counted, "copies", 0)
    names = [[f"tpu:{8 * host + i} of process {host}" for i in range(8)] for host in range(hosts)]
    tables: list[Any] = [{"a": {"01": Counted(each)}, "b": {"02": Counted(each)}} for each in names]
    merged = replica_check._merge(tables)
    assert merged["a"]["01"] == merged["b"]["02"] == [*itertools.chain(*names)]
    assert Counted.copies <= 2 * 8 * hosts
    assert tables[0]["a"]["01"] == names[0], "what was read is unchanged"
