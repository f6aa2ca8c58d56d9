"""Order of devices in a mesh: along the torus of a TPU slice, by hosts elsewhere."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from two_processes import in_two_processes

from jtrain.inspect.plan.topology import AbsentDevice
from jtrain.parallel.chips import CHIPS
from jtrain.parallel.mesh import host_order, make_mesh, order_devices, ring_hops
from jtrain.parallel.strategies.auto import MemoryNeeds, choose_slices
from jtrain.parallel.strategies.sharded import FSDP, Sharded


class StateShape(NamedTuple):
    """A state of parameters alone."""

    params: dict


def slices(kind: str, *sizes: int, count: int = 1) -> list[SimpleNamespace]:
    """Devices of slices as libtpu numbers them, with hosts of 2x2 chips."""
    x, y, z = (*sizes, 1, 1)[:3]
    found = []
    for number, (k, j, i) in itertools.product(
        range(count), itertools.product(range(z), range(y), range(x))
    ):
        host = (k * math.ceil(y / 2) + j // 2) * math.ceil(x / 2) + i // 2
        found.append(
            SimpleNamespace(
                id=number * 10_000 + (k * y + j) * x + i,
                process_index=number * 1_000 + host,
                coords=[i, j, k],
                core_on_chip=0,
                platform="tpu",
                device_kind=CHIPS[kind].kind,
                slice_index=number,
            )
        )
    return found


# Hops of a ring over each axis, last axis first, in the order of the hosts and in that of the mesh.
LAYOUTS = {
    "llama2_7b, v5e:4x4": ("v5e", (4, 4), [16], [18], [18]),
    "llama3_8b, v5p:4x4x4": ("v5p", (4, 4, 4), [64], [66], [66]),
    "mixtral_8x7b, v5p:2x2x4": ("v5p", (2, 2, 4), [2, 8], [10, 4], [8, 2]),
    "fsdp 4, tensor 4, v5e:4x4": ("v5e", (4, 4), [4, 4], [4, 8], [4, 8]),
    "fsdp 64, tensor 4, v5e:16x16": ("v5e", (16, 16), [64, 4], [4, 132], [4, 132]),
    "fsdp 16, tensor 16, v5e:16x16": ("v5e", (16, 16), [16, 16], [22, 48], [16, 16]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shorter_ring_of_the_last_axes_decides(name):
    kind, sizes, shape, hosts, taken = LAYOUTS[name]
    devices = slices(kind, *sizes)
    assert ring_hops(host_order(devices).reshape(shape)) == hosts
    ordered = order_devices(shape, devices)
    assert ring_hops(ordered) == taken <= hosts
    assert {d.id for d in ordered.flat} == {d.id for d in devices}


def test_an_axis_over_the_slice_runs_along_the_torus():
    ordered = order_devices([64], slices("v5p", 4, 4, 4))
    assert [d.coords for d in ordered] == [list(at) for at in itertools.product(range(4), repeat=3)]
    assert ordered.tolist() != host_order(ordered).tolist()


def test_an_axis_of_a_hosts_chips_lies_in_the_host():
    ordered = order_devices([4, 4], slices("v5e", 4, 4))
    assert all(len({d.process_index for d in row}) == 1 for row in ordered)


@pytest.mark.parametrize("shape", [[2, 16], [32], [2, 4, 4]], ids=str)
def test_slices_lie_outermost(shape):
    ordered = order_devices(shape, slices("v5e", 4, 4, count=2)).reshape(2, 16)
    assert [{d.slice_index for d in half} for half in ordered] == [{0}, {1}]


def test_devices_without_coordinates_and_a_part_of_a_slice_are_in_the_order_of_hosts():
    whole = slices("v5e", 4, 4)
    without = [SimpleNamespace(**{**vars(d), "coords": None}) for d in whole]
    for device in without:
        del device.coords
    holes = [d for d in whole if d.coords[0] != 1]
    for devices in (without, holes, jax.devices()):
        ordered = order_devices([len(devices)], devices)
        assert ordered.tolist() == host_order(devices).tolist()


def test_rings_are_those_of_published_slices():
    closed = [("v4", (4, 4, 4)), ("v5p", (4, 4, 8)), ("tpu7x", (8, 8, 8)), ("v5e", (16, 16))]
    assert all(CHIPS[kind].has_wrap(sizes) for kind, sizes in (*closed, ("v6e", (16, 16))))
    grids = [("v5p", (2, 4, 4)), ("v5e", (8, 16)), ("v6e", (8, 8)), ("v3", (16, 16))]
    assert not any(CHIPS[kind].has_wrap(sizes) for kind, sizes in grids)


def test_a_process_reads_neighbouring_rows_whatever_the_order_of_the_mesh():
    """The rows are placed by host, and moved to the order of the mesh."""
    mesh = make_mesh({"fsdp": 8}, jax.devices())
    other = jax.sharding.Mesh(mesh.devices[[0, 4, 1, 5, 2, 6, 3, 7]], mesh.axis_names)
    strategy = Sharded(other)
    assert strategy._host_mesh.devices.tolist() == mesh.devices.tolist()
    rows = np.arange(16.0).reshape(8, 2)
    by_host = jax.device_put(rows, NamedSharding(strategy._host_mesh, P("fsdp")))
    moved = jax.device_put(by_host, NamedSharding(other, P("fsdp")))
    np.testing.assert_array_equal(moved, rows)
    assert [s.device for s in moved.addressable_shards if s.data[0, 0] == 2.0] == [mesh.devices[4]]


@pytest.mark.thorough
def test_two_processes_read_neighbouring_rows_of_a_mesh_that_alternates():
    script = Path(__file__).with_name("rows_of_two.py")
    in_two_processes(script, lambda port, index: (port, str(index)), patience=120)


def test_only_large_meshes_of_tpus_ask_the_compiler_for_rings(monkeypatch):
    option = {"xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd_conservative"}
    strategy = Sharded(make_mesh({"fsdp": 8}, jax.devices()))
    assert strategy.compiler_options == {}
    strategy.mesh = SimpleNamespace(
        shape={"fsdp": 64}, devices=np.array(slices("v5p", 4, 4, 4), dtype=object)
    )
    assert strategy.compiler_options == option
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{next(iter(option))}=none")
    assert strategy.compiler_options == {}


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        ({}, {"slice": 2, "fsdp": 4}),
        ({"slices": "shard"}, {"fsdp": 8}),
        ({"slices": "replicate"}, {"slice": 2, "fsdp": 4}),
    ],
    ids=str,
)
def test_fsdp_replicates_over_slices_unless_told(words, axes):
    absent = [AbsentDevice(i, i // 4, i // 4, "tpu") for i in range(8)]
    assert FSDP(**words).build(absent).axes == axes
    assert FSDP(**words).build(absent[:4]).axes == {"fsdp": 4}


@pytest.mark.parametrize(("state", "chosen"), [(10_000, "replicate"), (10_000_000_000, "shard")])
def test_fsdp_shards_over_slices_what_does_not_fit_in_one(state, chosen):
    found = slices("v5e", 2, 2, count=2)
    leaf = jax.ShapeDtypeStruct((state, 4), np.float32)
    needs = MemoryNeeds(
        StateShape({"w": leaf}), dims={}, rows=8, microbatches=1, tokens=0, compute=None, saved=0
    )
    layout, why = choose_slices(FSDP(), found, lambda: needs)
    assert layout.slices == chosen
    other = "shard" if chosen == "replicate" else "replicate"
    assert f"parallel.slices={other}" in why
    assert choose_slices(layout, found, lambda: needs) == (layout, "")
