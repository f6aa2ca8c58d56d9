"""Collectives of the TPU compiler over slices as they exist, by the order of their devices."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.inspect.plan.collectives import collectives_of
from jtrain.inspect.plan.compile import compile_step, read_dump
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.topology import find_topology
from jtrain.parallel.mesh import host_order, order_devices
from jtrain.parallel.strategies.sharded import Sharded

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("from_the_top")]

HIDDEN, TOKENS = 1024, 256
SHARD = 64  # rows of the kernel: of less the compiler for v5e:16x16 makes no gather
TORUS = ("v4:4x4x4", "v5p:4x4x4", "v6e:16x16", "tpu7x:4x4x4", "v5e:16x16")


@functools.cache
def chips(where: str) -> tuple:
    return tuple(find_topology(where).devices)


def sent(ordered: np.ndarray, axes: tuple[str, ...], split: str, tmp_path) -> dict[str, int]:
    """Bytes by kind that gather a weight over an axis and reduce its gradient, of one of them."""
    mesh = Mesh(ordered, axes)
    placed = lambda *names: NamedSharding(mesh, P(*names))
    step = jax.jit(
        jax.grad(lambda w, x: jnp.tanh(x @ jax.lax.with_sharding_constraint(w, placed())).sum()),
        out_shardings=placed(split),
    )
    width = SHARD * mesh.shape[split]
    kernel = jax.ShapeDtypeStruct((width, HIDDEN), jnp.bfloat16, sharding=placed(split))
    rows = TOKENS * mesh.shape[split], width
    x = jax.ShapeDtypeStruct(rows, jnp.bfloat16, sharding=placed(split))
    compile_step(step.lower(kernel, x), tmp_path)
    found = collections.Counter()
    for each in collectives_of(HloProgram(read_dump(tmp_path)), dict(mesh.shape)).collectives:
        found[each.kind] += each.sent
    return dict(found)


@pytest.mark.parametrize("where", TORUS)
def test_an_axis_over_a_torus_is_gathered(where, tmp_path):
    ordered = order_devices([len(chips(where))], chips(where))
    found = sent(ordered, ("fsdp",), "fsdp", tmp_path)
    assert found["all-gather"] == SHARD * (len(ordered) - 1) * HIDDEN * 2


def test_the_order_of_hosts_gathers_by_reducing_zeros(tmp_path):
    found = sent(host_order(chips("v5p:4x4x4")), ("fsdp",), "fsdp", tmp_path)
    assert "all-gather" not in found


@pytest.mark.parametrize(
    ("where", "sizes", "split"),
    [
        ("v5e:4x4", {"fsdp": 4, "tensor": 4}, "fsdp"),
        ("v5e:4x4", {"fsdp": 4, "tensor": 4}, "tensor"),
        ("v5p:2x2x4", {"fsdp": 2, "expert": 8}, "expert"),
        ("v5e:4x4", {"fsdp": 16}, "fsdp"),
        ("v5e:8x8", {"fsdp": 64}, "fsdp"),
    ],
    ids=lambda value: str(value),
)
def test_the_chosen_order_sends_no_more_than_that_of_the_hosts(where, sizes, split, tmp_path):
    shape, totals = list(sizes.values()), []
    hosts = host_order(chips(where)).reshape(shape)
    for name, ordered in {"ours": order_devices(shape, chips(where)), "hosts": hosts}.items():
        totals.append(sum(sent(ordered, tuple(sizes), split, tmp_path / name).values()))
    assert totals[0] <= totals[1]
    assert totals[0] > 0


def test_the_option_for_rings_is_one_that_the_compiler_knows(tmp_path):
    strategy = Sharded(Mesh(order_devices([64], chips("v5p:4x4x4")), ("fsdp",)))
    jitted = jax.jit(lambda x: x.sum(), compiler_options=dict(strategy.compiler_options))
    rows = NamedSharding(strategy.mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=rows)
    compile_step(jitted.lower(x), tmp_path)
    assert strategy.compiler_options
