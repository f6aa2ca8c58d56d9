"""Memory on the host while published weights are read: a slice, and nothing that lives on."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.models.pretrained.tensors_table import put_slices, release_host_memory

ROOT = Path(__file__).parents[3]
DEVICES = 4
MESH = jax.make_mesh((DEVICES,), ("fsdp",), devices=jax.devices()[:DEVICES])


def test_one_slice_is_on_the_host_beside_that_of_the_transfer_before():
    hosts: list[weakref.ref] = []

    def read(index: tuple[slice, ...]) -> np.ndarray:
        assert sum(host() is not None for host in hosts) <= 1
        rows = len(range(16)[index[0]])
        numbers = np.empty(rows * 1000 + 1, np.float32)
        hosts.append(weakref.ref(numbers))
        part = numbers[1:].reshape(rows, 1000)  # JAX copies what is not aligned to 64 bytes
        part[...] = index[0].start
        return part

    found = put_slices((16, 1000), NamedSharding(MESH, PartitionSpec("fsdp")), read)
    assert len(hosts) == DEVICES
    release_host_memory()
    assert all(host() is None for host in hosts)
    expected = np.repeat(np.arange(0, 16, 4, dtype=np.float32), 4)
    np.testing.assert_array_equal(np.asarray(found[:, 7]), expected, strict=True)


def test_replicas_are_read_once():
    calls, mesh = [], jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    array = np.arange(24, dtype=np.float32).reshape(4, 6)

    def read(index):
        calls.append(index)
        return array[index].copy()

    sharding = NamedSharding(mesh, PartitionSpec(None, "b"))
    found = put_slices(array.shape, sharding, read)
    assert len(calls) == 2
    assert found.sharding == sharding
    np.testing.assert_array_equal(np.asarray(found), array, strict=True)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index], strict=True)


@pytest.mark.thorough
def test_resident_memory_beyond_the_arrays_is_at_most_a_tensor():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    script = str(ROOT / "benchmarks" / "reading_weights.py")
    command = [sys.executable, script, "--layers", "2", "--rounds", "1", "--json"]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    [found] = json.loads(run.stdout)
    assert found["largest"] == pytest.approx(131.072)
    assert found["peak"] < found["largest"]
    assert found["end"] < found["largest"] / 4
