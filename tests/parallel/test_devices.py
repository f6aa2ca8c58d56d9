"""Devices by number, by index and by name, what is refused, and their order in a mesh."""

import itertools
import math
import re
import types
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_environ import run_python
from pydantic import ValidationError
from two_processes import in_two_processes

import jtrain as jt
from jtrain.inspect.plan.topology import AbsentDevice
from jtrain.parallel import FSDP, Auto, Axes, Mirrored, Single
from jtrain.parallel.chips import CHIPS, find_chip, peak_flops
from jtrain.parallel.devices import devices, one_device, parse_devices
from jtrain.parallel.mesh import host_order, make_mesh, order_devices, ring_hops
from jtrain.parallel.strategies.auto import MemoryNeeds, choose_slices
from jtrain.parallel.strategies.sharded import Sharded

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
BATCH = {"x": X, "y": X.sum(1), "row": np.arange(32, dtype=np.int32), "mask": np.ones(32, bool)}


def loss(params, batch, rng):
    return jt.Mean.of((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


def ids(found) -> list[int]:
    return [device.id for device in found]


def fakes(platform: str, processes: int, each: int) -> list[SimpleNamespace]:
    """Make devices of several processes, to compile for."""
    make = lambda i: SimpleNamespace(
        id=i, process_index=i // each, platform=platform, device_kind="fake"
    )
    return [make(i) for i in range(processes * each)]


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (0, range(8)), (3, [0, 1, 2]), ((5,), [5]), ("cpu", range(8)), (("cpu:6", "cpu:3"), [6, 3]),
        ("/device:CPU:1", [1]),
    ],
)  # fmt: skip
def test_devices_by_number_by_index_and_by_name(asked, got):
    assert ids(devices(asked)) == list(got)


def test_each_process_gives_the_devices_that_were_asked_for():
    there = fakes("gpu", processes=2, each=4)
    assert ids(devices(2, there)) == [0, 1, 4, 5]
    assert ids(devices((0, 2), there)) == [0, 2, 4, 6]
    assert ids(devices("gpu:3", there)) == [3, 7]
    assert ids(devices("gpu", there)) == list(range(8))


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (-1, "must be at least 0, found -1"),
        ((1, "cpu:1"), "must name each device once"),
        ("cpu:", "must name devices, and 'cpu:' is none"),
        (("cpu:0", "gpu:1"), r"must be devices of one platform, found \[cpu:0,gpu:1\]"),
        (1.5, "must say devices, found 1.5"),
    ],
)
def test_what_is_no_device_is_told_before_a_device_is_touched(written, why):
    advice = r"\. Write how many, 0 for all; their indices, such as \[0,2\]; or a platform"
    with pytest.raises(ValueError, match=why) as caught:
        parse_devices(written)
    assert re.search(advice, str(caught.value))
    with pytest.raises(ValidationError, match=why):
        Mirrored(devices=written)


def test_one_device_is_the_first_or_the_one_that_is_named():
    assert [one_device(asked).id for asked in (0, 1, (2,), "cpu:5", "cpu")] == [0, 0, 2, 5, 0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("values", "where"),
    [
        (Single(devices="cpu:5"), {5}),
        (Mirrored(devices=(1, 4), impl="pmap"), {1, 4}),
        (FSDP(devices=("cpu:6", "cpu:3"), min_size=0), {3, 6}),
        (Axes(devices=(0, 2, 5, 7), data=2, min_size=0), {0, 2, 5, 7}),
    ],
    ids=["single", "pmap", "fsdp", "sharded"],
)
def test_every_strategy_takes_its_step_on_the_devices_that_were_chosen(values, where):
    strategy, optimizer = values.build(), optax.sgd(0.1)
    new = lambda: jt.new_state({"w": jnp.zeros(4)}, optimizer, jax.random.key(0))
    state = jax.jit(new, out_shardings=strategy.shardings(jax.eval_shape(new)))()
    step = jt.make_step(loss, optimizer, psum=strategy.psum)
    batch = strategy.place(BATCH)
    state, metrics = strategy.compile(step, state, batch, returns_state=True)(state, batch)
    for array in jax.tree.leaves((state, batch, metrics)):
        assert set(ids(array.sharding.device_set)) == where
    # One step of gradient descent from 0: the mean of 2 x y, times the rate.
    want = 0.1 * 2 * (X * X.sum(1, keepdims=True)).mean(0)
    assert_close(state.params["w"], want, 1e-5)


def test_auto_splits_over_the_devices_that_were_chosen():
    assert ids(Auto(devices=(6, 1)).among(None)) == [6, 1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "where"),
    [({"devices": ["cpu:1", "cpu:4"]}, {1, 4}), ({"devices": "cpu:3", "parallel": "single"}, {3})],
    ids=str,
)
def test_fit_evaluate_and_predict_compute_where_they_are_told(given, where):
    how = {"lr": 0.1, "steps": 2, "quiet": True, **given}
    result = jt.fit(loss, {"w": jnp.zeros(4)}, (X, X.sum(1)), "sgd", **how)
    for array in jax.tree.leaves(result.state):
        assert set(ids(array.sharding.device_set)) == where
    # What is computed elsewhere would say so: arrays that lie on other devices are not taken.
    found = jt.evaluate(loss, result.params, (X, X.sum(1)), **given)
    apply = lambda params, batch: batch["x"] @ params["w"]
    guesses = jt.predict(apply, result.params, X, **given)
    assert found["loss"] == pytest.approx(float(((guesses - X.sum(1)) ** 2).mean()), rel=1e-5)


@pytest.mark.thorough
def test_a_cpu_is_cut_into_as_many_devices_as_the_last_index_needs():
    code = (
        "from jtrain.parallel import Single, Mirrored\n"
        "assert [d.id for d in Mirrored(devices=(0, 2)).build().mesh.devices] == [0, 2]\n"
        "import jax; print(jax.device_count())"
    )
    done = run_python("-c", code, env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"})
    assert done.stdout.split() == ["3"]


def chips(kind, count, cores=1):
    return [types.SimpleNamespace(device_kind=kind, core_on_chip=i % cores) for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "count", "cores", "teraflops"),
    [
        ("TPU v5 lite", 16, 1, 16 * 197),
        ("TPU7x", 8, 2, 4 * 2307),
        ("NVIDIA H100 80GB HBM3", 8, 1, 8 * 989),
    ],
)
def test_the_peak_of_all_devices(kind, count, cores, teraflops):
    assert peak_flops(chips(kind, count, cores)) == teraflops * 1e12


def test_a_processor_has_no_published_peak():
    assert peak_flops(chips("cpu", 8)) is None
    assert find_chip(chips("NVIDIA GeForce RTX 9999", 1)) is None


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
        numbers = {"id": number * 10_000 + (k * y + j) * x + i, "slice_index": number}
        at = {"process_index": number * 1_000 + host, "coords": [i, j, k], "core_on_chip": 0}
        chip = {"platform": "tpu", "device_kind": CHIPS[kind].kind}
        found.append(SimpleNamespace(**numbers, **at, **chip))
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
    for some in (without, holes, jax.devices()):
        ordered = order_devices([len(some)], some)
        assert ordered.tolist() == host_order(some).tolist()


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
