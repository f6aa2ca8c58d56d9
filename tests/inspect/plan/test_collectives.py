"""Collectives read from compiled programs equal counts by hand, in every compiler's spelling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    Collective,
    CollectiveTraffic,
    collectives_of,
    is_forward,
    parse_replica_groups,
)
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


def read_collectives(text: str, mesh: dict[str, int]) -> CollectiveTraffic:
    return collectives_of(HloProgram(text), mesh)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("fn", "out", "kind", "axes", "sent"),
    [
        (lambda x: jax.lax.psum(x, "fsdp"), P(), "all-reduce", ("fsdp",), 2 * 4096 * 3 // 4),
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
    ids=["reduce", "both axes", "gather", "permute", "exchange"],
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
    text = grad.lower(floats(64, 32), floats(16, 64)).compile().as_text()
    (found,) = read_collectives(text, SIZES).collectives
    assert (found.axes, found.kind) == (("data", "fsdp"), "all-reduce")
    assert found.sent == 2 * 64 * 32 * 4 * 7 // 8


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


# As libtpu 0.0.52 writes for tpu7x: an array of a tuple as `tuple#1`, in a loop whose counter is
# such an array, and a gather behind two calls that another core carries out.
OFFLOADED = """\
HloModule jit_step, is_scheduled=true

%cond (p: (s32[], bf16[1,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(4)
  %p.1 = (s32[]{:T(128)}, bf16[1,128]{1,0:T(2,128)(2,1)}) parameter(0)
  ROOT %less = pred[]{:T(512)} compare(%p.1#0, %limit), direction=LT
}

%called (a: bf16[1,128]) -> bf16[1,1024] {
  %a.1 = bf16[1,128]{1,0:T(2,128)(2,1)} parameter(0)
  %pack = (bf16[1,128]{1,0:T(2,128)(2,1)}) tuple(%a.1)
  ROOT %gathered = bf16[1,1024]{1,0} all-gather(%pack#0), channel_id=66, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}
}, execution_thread="sparsecore"

%offloaded (a: bf16[1,128]) -> bf16[1,1024] {
  %a.2 = bf16[1,128]{1,0:T(2,128)(2,1)} parameter(0)
  ROOT %call = bf16[1,1024]{1,0} custom-call(%a.2), custom_call_target="offload", called_computations={%called}
}, execution_thread="sparsecore"

%body (p: (s32[], bf16[1,128])) -> (s32[], bf16[1,128]) {
  %p.2 = (s32[]{:T(128)}, bf16[1,128]{1,0:T(2,128)(2,1)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %start = ((), (), (s32[8192]{0:T(1024)}, s32[0]{0:S(10)})) async-start(), async_execution_thread="sparsecore", calls=%offloaded
  %update = ((bf16[1,128]{1,0}), bf16[1,1024]{1,0}, (s32[8192]{0:T(1024)})) async-update(%start, %p.2#1), output_to_operand_aliasing={{2,0}: (0, {2,0})}
  %done = bf16[1,1024]{1,0} async-done(%update)
  %next = s32[]{:T(128)} add(%p.2#0, %one)
  ROOT %out = (s32[], bf16[1,128]{1,0}) tuple(%next, %p.2#1)
}

ENTRY %main (x: bf16[1,128]) -> bf16[1,128] {
  %x.3 = bf16[1,128]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %begin = (s32[], bf16[1,128]{1,0}) tuple(%zero, %x.3)
  %loop = (s32[], bf16[1,128]{1,0}) while(%begin), condition=%cond, body=%body
  ROOT %got = bf16[1,128]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501

# Two gradients scattered at once, as libtpu writes for v6e: a reduction of both, a part of each.
SCATTERED = """\
HloModule jit_step, is_scheduled=true

%scatter (a: bf16[4096,1024], b: bf16[1024,1024]) -> (bf16[4096,256], bf16[1024,256]) {
  %a.1 = bf16[4096,1024]{1,0} parameter(0)
  %b.1 = bf16[1024,1024]{1,0} parameter(1)
  %sum = (bf16[4096,1024]{1,0}, bf16[1024,1024]{1,0}) all-reduce(%a.1, %b.1), channel_id=1, replica_groups={{0,1,2,3}}
  %sum.0 = bf16[4096,1024]{1,0} get-tuple-element(%sum), index=0
  %zero = u32[] constant(0)
  %part.0 = bf16[4096,256]{1,0} dynamic-slice(%sum.0, %zero, %zero), dynamic_slice_sizes={4096,256}
  %part.1 = bf16[1024,256]{1,0} dynamic-slice(%sum#1, %zero, %zero), dynamic_slice_sizes={1024,256}
  ROOT %both = (bf16[4096,256]{1,0}, bf16[1024,256]{1,0}) tuple(%part.0, %part.1)
}

ENTRY %main (a: bf16[4096,1024], b: bf16[1024,1024]) -> (bf16[4096,256], bf16[1024,256]) {
  %a.2 = bf16[4096,1024]{1,0} parameter(0)
  %b.2 = bf16[1024,1024]{1,0} parameter(1)
  ROOT %got = (bf16[4096,256]{1,0}, bf16[1024,256]{1,0}) fusion(%a.2, %b.2), kind=kCustom, calls=%scatter
}
"""  # noqa: E501


def test_an_offloaded_gather_is_counted_with_its_turns():
    found, unread = read_collectives(OFFLOADED, {"fsdp": 8})
    (gather,) = found
    assert (gather.kind, gather.axes, gather.times) == ("all-gather", ("fsdp",), 4)
    assert gather.sent == 4 * 1024 * 2 * 7 // 8
    assert not unread


def test_sliced_reductions_are_scatters():
    (scatter,) = read_collectives(SCATTERED, {"fsdp": 4}).collectives
    assert scatter.kind == "reduce-scatter"
    assert scatter.sent == (4096 + 1024) * 256 * 2 * 3
    whole = SCATTERED.replace("tuple(%part.0, %part.1)", "tuple(%part.0, %sum.0)")
    (reduction,) = read_collectives(whole, {"fsdp": 4}).collectives
    assert reduction.kind == "all-reduce"


def test_groups_in_every_format():
    for spelt, groups in [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh[a=2,b=4] {b:(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=2, device_ids=([2,2]<=[2,2]T(1,0))] {'b'}",
            [[0, 2], [1, 3]],
        ),
        ("replica_groups=mesh['a'=2,'b'=2, device_ids=(3,1,2,0)] {'b'}", [[3, 1], [2, 0]]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, metadata={}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        ("source_target_pairs={{0,2},{2,4},{4,0},{1,3}}", [[0, 2, 4]]),
        ("source_target_pairs={{0,0},{1,2},{2,1}}", [[1, 2]]),
        ("replica_groups={}", None),
        ("channel_id=3", None),
    ]:
        found = parse_replica_groups(f", channel_id=1, {spelt}, use_global_device_ids=true")
        assert (found if found is None else np.asarray(found).tolist()) == groups


@pytest.mark.parametrize(
    ("pairs", "forward"),
    [
        ("{{0,1},{1,2},{2,0}}", True),
        ("{{0,2},{1,0},{2,1}}", False),
        ("{{0,4},{4,8},{8,0},{1,5},{5,9},{9,1}}", True),
        ("{{0,8},{4,0},{8,4},{1,9},{5,1},{9,5}}", False),
        ("{{3,2},{2,1},{1,0}}", False),
    ],
)
def test_the_direction_of_a_ring_is_that_of_its_axis_at_any_stride(pairs, forward):
    assert is_forward(f"channel_id=1, source_target_pairs={pairs}, x=1") == forward


def test_an_unreadable_collective_keeps_the_others():
    text = SCATTERED.replace(
        "ROOT %got",
        "%other = bf16[8]{0} all-gather(%a.2), replica_groups=@later<a=4>, dimensions={0}\n"
        "  ROOT %got",
    )
    found, unread = read_collectives(text, {"fsdp": 4})
    assert [each.kind for each in found] == ["reduce-scatter"]
    assert unread == (
        "one all-gather: its replica_groups=@later<a=4>, dimensions={0} have an unknown format",
    )


def test_computations_may_be_printed_without_their_parameters():
    text = "\n".join(line.partition(" (")[0] + " {" if line.endswith("{") else line
                     for line in OFFLOADED.splitlines())  # fmt: skip
    assert "%body {" in text
    assert read_collectives(text, {"fsdp": 8}) == read_collectives(OFFLOADED, {"fsdp": 8})


def test_groups_outside_of_the_mesh_are_reported():
    found, unread = read_collectives(SCATTERED, {"fsdp": 2})
    assert not found
    assert unread == ("one all-reduce: it names device 3, and the mesh has 2 devices",)


def test_an_unknown_number_of_turns_is_reported():
    found, unread = read_collectives(OFFLOADED.replace("direction=LT", "direction=NE"), {"fsdp": 8})
    assert found[0].times == 1
    assert unread == (
        "how often 1 of the collectives run, in loops with an unknown number of turns: they count "
        "as one turn",
    )


def test_incomplete_text_raises():
    for text, said in [
        ("", "no ENTRY computation in 0 characters"),
        (SCATTERED.replace("ENTRY ", ""), "no ENTRY computation in"),
        (SCATTERED.replace("%scatter (a", "%renamed (a"), "%main calls %scatter, which is not in"),
        (OFFLOADED.replace("condition=%cond, ", ""), "condition"),
    ]:
        with pytest.raises(NOT_UNDERSTOOD, match=said):
            read_collectives(text, {"fsdp": 4})
