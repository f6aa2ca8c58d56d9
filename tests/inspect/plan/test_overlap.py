"""Collectives beside computation, in schedules written by hand."""

import pytest

from jtrain.inspect.plan.collectives import collectives_of
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.overlap import mark_overlapped
from jtrain.inspect.plan.plan import collective_table
from jtrain.inspect.plan.schedule import Simulation, Speeds

MESH = {"fsdp": 4}
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
GATHER = 3 * 1024 * 4  # bytes that a device sends
PRODUCT = 2 * 64**3  # operations


def program(*lines: str, before: str = "") -> HloProgram:
    body = "\n".join(f"  {line}" for line in lines)
    return HloProgram(
        f"HloModule m, is_scheduled=true\n\n{before}"
        "ENTRY %main (x: f32[1024], y: f32[64,64]) -> f32[64,64] {\n"
        "  %x = f32[1024]{0} parameter(0)\n  %y = f32[64,64]{1,0} parameter(1)\n"
        f"{body}\n}}\n"
    )


DOT = (
    "%d = f32[64,64]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "%n = f32[64,64]{1,0} negate(%y)",
)
START = f"%s = (f32[1024]{{0}}, f32[4096]{{0}}) all-gather-start(%x), {GROUPS}"
DONE = "%g = f32[4096]{0} all-gather-done(%s)"
PAIR = program(START, DOT[0], DONE, "ROOT %r = f32[64,64]{1,0} negate(%d)")
EMPTY = program(START, DOT[1], DONE, DOT[0], "ROOT %r = f32[64,64]{1,0} negate(%d)")
PLAIN = program(
    f"%g = f32[4096]{{0}} all-gather(%x), {GROUPS}", DOT[0], "ROOT %r = f32[64,64] negate(%d)"
)
# The TPU compiler's chain: start, a product with a piece of the collective in it, done.
PIECE = (
    "%all-gather.{n} = f32[4096]{{0}} all-gather(%p), channel_id=7, "
    'replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="3"}}'
)


def computation(number: int, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"%f{number} (p: f32[1024], q: f32[64,64]) -> f32[64,64] {{\n"
        f"  %p = f32[1024]{{0}} parameter(0)\n  %q = f32[64,64]{{1,0}} parameter(1)\n"
        f"  {PIECE.format(n=number)}\n{body}\n}}\n\n"
    )


CALL = '%c{n} = f32[4096]{{0}} custom-call(%all-gather.{n}), custom_call_target="{target}"'
CHAIN = program(
    *[f"%u{n} = f32[64,64]{{1,0}} fusion(%x, %y), kind=kOutput, calls=%f{n}" for n in (1, 2, 3)],
    "ROOT %r = f32[64,64]{1,0} negate(%u2)",
    before=computation(
        1, CALL.format(n=1, target="AsyncCollectiveStart"), "ROOT %z = f32[64,64]{1,0} copy(%q)"
    )
    + computation(
        2,
        "ROOT %z = f32[64,64]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    + computation(
        3, CALL.format(n=3, target="AsyncCollectiveDone"), "ROOT %z = f32[64,64]{1,0} copy(%q)"
    ),
)


@pytest.mark.parametrize(
    ("given", "overlapped"),
    [(PAIR, True), (EMPTY, False), (PLAIN, False), (CHAIN, True)],
    ids=["pair", "pair without a product", "synchronous", "chain"],
)
def test_a_collective_is_overlapped_if_a_product_is_before_its_end(given, overlapped):
    (one,) = mark_overlapped(collectives_of(given, MESH).collectives, given, MESH)
    assert one.sent == GATHER
    assert one.overlapped == overlapped
    (row,) = collective_table([one])
    assert (row.kind, row.axes, row.times) == ("all-gather", ("fsdp",), 1)
    assert row.overlapped == GATHER * overlapped


@pytest.mark.parametrize(
    ("given", "link", "exposed"),
    [
        (PAIR, GATHER / 2.0, 1.0),  # 2 s of a collective beside 1 s of a product
        (PAIR, GATHER / 0.5, 0.0),
        (PLAIN, GATHER / 2.0, 2.0),
        (EMPTY, GATHER / 2.0, 2.0),
        (CHAIN, GATHER / 2.0, 1.0),
    ],
)
def test_the_device_waits_for_the_rest_of_a_collective(given, link, exposed):
    speeds = Speeds(flops=PRODUCT, memory=1e12, host=1e12, link=lambda _: link)
    line = Simulation(given, MESH, speeds).run()
    assert line.compute == 1.0
    assert line.exposed == pytest.approx(exposed, abs=1e-6)
    assert line.total == pytest.approx(1.0 + exposed, abs=1e-6)
