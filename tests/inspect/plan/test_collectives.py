"""Collectives read from compiled programs equal counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.inspect.plan.collectives import Collective, read_collectives, sum_by_axes
from jtrain.inspect.plan.hlo import HloProgram, array_sizes

SIZES = {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(
        np.array(jax.devices()).reshape(2, 4), tuple(SIZES), axis_types=(AxisType.Auto,) * 2
    )


def found(mesh: Mesh, fn, *shapes, into=P(), out=P()) -> list[Collective]:
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
    text = jax.jit(mapped).lower(*shapes).compile().as_text()
    return list(read_collectives(text, SIZES).collectives)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("fn", "out", "kind", "axes", "sent"),
    [
        (lambda x: jax.lax.psum(x, "fsdp"), P(), "all-reduce", ("fsdp",), 2 * 4096 * 3 // 4),
        (lambda x: jax.lax.psum(x, "data"), P(), "all-reduce", ("data",), 2 * 4096 // 2),
        (lambda x: jax.lax.psum(x, ("data", "fsdp")), P(), "all-reduce", ("data", "fsdp"), 7168),
        (lambda x: jax.lax.all_gather(x, "fsdp"), P(), "all-gather", ("fsdp",), 3 * 4096),
        (
            lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
            P(),
            "collective-permute",
            ("fsdp",),
            4096,
        ),
        (
            lambda x: jax.lax.all_to_all(x.reshape(4, -1), "data", 0, 0, tiled=True),
            P(),
            "all-to-all",
            ("data",),
            2048,
        ),
    ],
    ids=["reduce", "other axis", "both axes", "gather", "permute", "exchange"],
)
def test_a_collective_equals_the_count_by_hand(mesh, fn, out, kind, axes, sent):
    (one,) = found(mesh, fn, floats(1024), out=out)
    assert (one.kind, one.axes, one.sent, one.times) == (kind, axes, sent, 1)


def test_turns_of_nested_loops_are_counted(mesh):
    def fn(x):
        def outer(x, _):
            inner = lambda i, x: jnp.sin(jax.lax.psum(x, "fsdp"))
            return jax.lax.fori_loop(2, 5, inner, x), None

        return jax.lax.scan(outer, x, None, length=7)[0]

    (one,) = found(mesh, fn, floats(1024))
    assert one.times == 21
    assert one.sent == 21 * 2 * 4096 * 3 // 4
    assert "psum" in one.where


def test_a_group_of_one_device_sends_nothing():
    lone = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    fn = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=lone, in_specs=P(), out_specs=P())
    assert read_collectives(jax.jit(fn).lower(floats(8)).compile().as_text(), {"data": 1}) == (
        (),
        (),
    )


def test_collectives_added_by_the_compiler_are_found(mesh):
    """Expect one reduction and no gather for the gradient of split weights over split rows."""
    rows, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    grad = jax.jit(
        jax.grad(lambda w, x: jnp.sin(x @ w).sum()), in_shardings=(whole, rows), out_shardings=whole
    )
    table = sum_by_axes(
        read_collectives(
            grad.lower(floats(64, 32), floats(16, 64)).compile().as_text(), SIZES
        ).collectives
    )
    assert table == {"data x fsdp": {"all-reduce": 2 * 64 * 32 * 4 * 7 // 8}}


# TPU compiler output: a ring that is unrolled twice, and a gather in pieces.
RING = """\
HloModule jit_step, is_scheduled=true

%cond (p: (u32[], bf16[8,128])) -> pred[] {
  %p.1 = (u32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = u32[]{:T(128)} constant(8)
  %at = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

%piece (a: bf16[1,256]) -> bf16[1,4096] {
  %a.1 = bf16[1,256]{1,0:T(2,128)(2,1)} parameter(0)
  ROOT %again = bf16[1,4096]{1,0:T(2,128)(2,1)} all-gather(%a.1), channel_id=7, replica_groups=mesh['fsdp'=16] {'fsdp'}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%body (p: (u32[], bf16[8,128])) -> (u32[], bf16[8,128]) {
  %p.2 = (u32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %two = u32[]{:T(128)} constant(2)
  %at.2 = u32[]{:T(128)} get-tuple-element(%p.2), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%p.2), index=1
  %on = bf16[1,4096]{1,0} fusion(%x), kind=kCustom, calls=%piece
  %start = (bf16[8,128]{1,0}, bf16[8,128]{1,0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=9, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,8},{8,9},{9,10},{10,11},{11,12},{12,13},{13,14},{14,15},{15,0}}
  %done = bf16[8,128]{1,0} collective-permute-done(%start)
  %next = u32[]{:T(128)} add(%at.2, %two)
  ROOT %out = (u32[], bf16[8,128]{1,0}) tuple(%next, /*index=1*/%done)
}

ENTRY %main (x: bf16[8,128], a: bf16[1,256]) -> bf16[8,128] {
  %x.3 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %a.3 = bf16[1,256]{1,0} parameter(1)
  %first = bf16[1,4096]{1,0} fusion(%a.3), kind=kCustom, calls=%piece
  %zero = u32[]{:T(128)} constant(0)
  %begin = (u32[], bf16[8,128]{1,0}) tuple(%zero, %x.3)
  %loop = (u32[], bf16[8,128]{1,0}) while(%begin), condition=%cond, body=%body
  ROOT %got = bf16[8,128]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_unrolled_rings_and_split_gathers_are_counted_once():
    ring, gather = sorted(
        read_collectives(RING, {"fsdp": 16}).collectives, key=lambda each: each.kind
    )[::-1]
    assert (ring.kind, ring.times, ring.sent) == ("collective-permute", 4, 4 * 8 * 128 * 2)
    assert (gather.kind, gather.times, gather.sent) == ("all-gather", 1, 4096 * 2 * 15 // 16)


def test_sizes_of_shapes():
    assert array_sizes("(bf16[4,3]{1,0:T(8,128)}, pred[7], s4[3], u32[])") == [24, 7, 2, 4]
    assert array_sizes("f8e4m3fn[5,2]") == [10]


def test_each_line_of_a_real_program_is_read(mesh):
    text = (
        jax.jit(lambda x: jnp.linalg.norm(jnp.sin(x) @ x.T)).lower(floats(8, 8)).compile().as_text()
    )
    program = HloProgram(text)
    assert program.entry
    lines = [line for line in text.splitlines() if " = " in line and line.startswith("  ")]
    assert sum(map(len, program.computations.values())) == len(lines)
    assert all(i.operation for c in program.computations.values() for i in c.values())
