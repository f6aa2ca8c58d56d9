"""Time of a program: operations, bytes, links and overlap equal counts by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from small_plans import small

from jtrain.inspect.plan.collectives import Collective, collective_table, collectives_of
from jtrain.inspect.plan.compile import compile_step
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.op_costs import op_cost, op_flops, unknown_kernels
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.roofline import chip_speeds
from jtrain.inspect.plan.schedule import Simulation, Speeds, mark_overlapped
from jtrain.inspect.plan.topology import find_topology
from jtrain.parallel.chips import CHIPS, GPUS
from jtrain.train.runtime import enable_compilation_cache

ONE = Speeds(flops=1.0, memory=1.0, host=1.0, link=lambda _: 1.0)


def work(fn, *shapes) -> tuple[float, float]:
    """Return operations and bytes of a compiled function, with all turns of its loops."""
    text = jax.jit(fn).lower(*shapes).compile().as_text()
    line = Simulation(HloProgram(text), {"data": 1}, ONE).run()
    return line.flops, line.memory


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_products_count_in_loops():
    def fn(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    flops, _ = work(fn, floats(8, 32), floats(7, 32, 32))
    assert flops == 7 * 2 * 8 * 32 * 32


def test_batched_products_and_convolutions_count():
    flops, _ = work(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), floats(3, 8, 16), floats(3, 16, 4)
    )
    assert flops == 3 * 2 * 8 * 16 * 4
    conv = lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID")
    flops, _ = work(conv, floats(2, 3, 10, 10), floats(5, 3, 3, 3))
    assert flops == 2 * 2 * 5 * 8 * 8 * 3 * 3 * 3


def test_the_gradient_of_a_depthwise_kernel_counts_its_groups_once():
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=8)
    shapes = floats(4, 8, 9, 9), floats(16, 1, 3, 3)
    gradient = lambda x, k: jax.vjp(lambda k: conv(x, k), k)[1](jnp.ones((4, 16, 7, 7)))[0]
    text = jax.jit(gradient).lower(*shapes).compiler_ir("hlo").as_hlo_text()  # CPUs write others
    assert "batch_group_count=8" in text
    program = HloProgram(text)
    flops = sum(op_flops(program, run.within, run.instruction) for run in program.walk())
    assert flops == 2 * (16 * 3 * 3) * (4 * 7 * 7)


def test_a_loop_reads_the_slice_of_a_turn():
    def fn(x, weights):
        return jax.lax.scan(lambda x, w: (x + w, None), x, weights)[0]

    _, moved = work(fn, floats(4096), floats(9, 4096))
    turn = 3 * 4096 * 4  # reads x and a slice, writes x
    assert 9 * turn <= moved <= 9 * turn * 1.5  # the loop may copy x


def test_the_tpu_compilers_batched_product_counts_without_its_padding():
    program = HloProgram(
        "HloModule m\n\nENTRY %main (a: f32[2], b: f32[2]) -> f32[2] {\n"
        "  %a = bf16[2048,2,256,1,1]{2,1,0,4,3} parameter(0)\n"
        "  %b = bf16[32,3,128,2,256]{4,2,3,1,0} parameter(1)\n"
        "  ROOT %c = bf16[2048,32,3,128,1]{3,0,4,2,1} convolution(%a, %b), window={size=32x3x2 "
        "pad=31_31x2_2x0_0 rhs_reversal=1x1x0}, dim_labels=b2f01_01o2i->b01f2\n}\n"
    )
    root = program.roots["main"]
    # 2,048 rows by 2 x 256 features, into 32 x 3 x 128.
    assert op_flops(program, "main", root) == 2 * 2048 * (2 * 256) * (32 * 3 * 128)


def test_memory_inside_the_chip_is_free_and_the_hosts_counts_apart():
    program = HloProgram(
        "HloModule m\n\nENTRY %main (a: f32[2]) -> f32[2] {\n"
        "  %a = f32[1024]{0:T(128)S(1)} parameter(0)\n"
        "  %b = f32[1024]{0:T(128)} add(%a, %a)\n"
        "  ROOT %c = f32[1024]{0:T(128)S(5)} copy(%b)\n}\n"
    )
    scope = program.computations["main"]
    assert op_cost(program, "main", scope["b"])[1:3] == (4096, 0)
    assert op_cost(program, "main", scope["c"])[1:3] == (4096, 4096)


def call(kernel: str, operands: dict[str, str], out: str) -> HloProgram:
    """Return a program that calls a kernel of the TPU compiler."""
    lines = [f"  %{name} = {kind} parameter(0)" for name, kind in operands.items()]
    names = ", ".join(f"%{name}" for name in operands)
    return HloProgram(
        "HloModule m\n\nENTRY %main (q: f32[2]) -> f32[2] {\n"
        + "\n".join(lines)
        + f"\n  ROOT %{kernel}.1 = {out} custom-call({names}), "
        'custom_call_target="tpu_custom_call"\n}\n'
    )


def test_attention_kernels_count():
    for kernel, products in [("splash_mha_dkv", 4), ("other", 0)]:
        q, k = "bf16[4,256,64]{2,1,0}", "bf16[4,512,64]{2,1,0}"
        program = call(kernel, {"q": q, "k": k}, q)
        flops = op_flops(program, "main", program.roots["main"])
        assert flops == 2 * products * 4 * 256 * 512 * 64
        assert unknown_kernels(program) == ([] if products else ["other"])


def test_products_of_experts_count_their_rows_once():
    for left, right, out in [
        ("bf16[96,16]{1,0}", "bf16[2,16,24]{2,1,0}", "bf16[96,24]{1,0}"),
        ("bf16[96,16]{1,0}", "bf16[96,24]{1,0}", "bf16[2,16,24]{2,1,0}"),  # a gradient
    ]:
        groups = {"sizes": "s32[2]{0}"}
        program = call("ragged-dot-none", {**groups, "left": left, "right": right}, out)
        assert op_flops(program, "main", program.roots["main"]) == 2 * 96 * 16 * 24
        counts = call("ragged-dot-metadata", groups, "(s32[2]{0}, s32[8]{0})")
        assert unknown_kernels(program) == unknown_kernels(counts) == []


MESH = {"fsdp": 4}
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
GATHER = 3 * 1024 * 4  # bytes that a device sends
PRODUCT = 2 * 64**3  # operations


def scheduled(*lines: str, before: str = "") -> HloProgram:
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
PAIR = scheduled(START, DOT[0], DONE, "ROOT %r = f32[64,64]{1,0} negate(%d)")
EMPTY = scheduled(START, DOT[1], DONE, DOT[0], "ROOT %r = f32[64,64]{1,0} negate(%d)")
PLAIN = scheduled(
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
CHAIN = scheduled(
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


def test_a_collective_is_overlapped_if_a_product_is_before_its_end():
    for given, overlapped in [(PAIR, True), (EMPTY, False), (PLAIN, False), (CHAIN, True)]:
        (one,) = mark_overlapped(collectives_of(given, MESH).collectives, given, MESH)
        assert one.sent == GATHER
        assert one.overlapped == overlapped
        (row,) = collective_table([one])
        assert (row.kind, row.axes, row.times) == ("all-gather", ("fsdp",), 1)
        assert row.overlapped == GATHER * overlapped


def test_the_device_waits_for_the_rest_of_a_collective():
    for given, link, exposed in [
        (PAIR, GATHER / 2.0, 1.0),  # 2 s of a collective beside 1 s of a product
        (PAIR, GATHER / 0.5, 0.0),
        (PLAIN, GATHER / 2.0, 2.0),
        (EMPTY, GATHER / 2.0, 2.0),
        (CHAIN, GATHER / 2.0, 1.0),
    ]:
        speeds = Speeds(flops=PRODUCT, memory=1e12, host=1e12, link=lambda _, link=link: link)
        line = Simulation(given, MESH, speeds).run()
        assert line.compute == 1.0
        assert line.exposed == pytest.approx(exposed, abs=1e-6)
        assert line.total == pytest.approx(1.0 + exposed, abs=1e-6)


H100 = next(chip for chip in GPUS if chip.kind == "NVIDIA H100")


def tpu(rows: int, columns: int, slices: int = 1, core: int = 0) -> list:
    make = lambda s, x, y: SimpleNamespace(
        platform="tpu", slice_index=s, coords=[x, y, 0], core_on_chip=core, process_index=0
    )
    return [make(s, x, y) for s in range(slices) for x in range(rows) for y in range(columns)]


def gpus(machines: int, each: int) -> list:
    return [
        SimpleNamespace(platform="gpu", process_index=m, device_kind="NVIDIA H100 80GB HBM3")
        for m in range(machines)
        for _ in range(each)
    ]


def collective(kind: str, *axes: str) -> Collective:
    return Collective(kind, axes, 1)


def test_a_collective_of_a_slice_uses_the_links_of_its_axes():
    for mesh, devices, kind, axes, gigabytes in [
        ({"fsdp": 16}, tpu(4, 4), "all-gather", ("fsdp",), 200),  # four links of 50
        ({"fsdp": 4, "tensor": 4}, tpu(4, 4), "all-gather", ("tensor",), 100),  # of a row
        ({"fsdp": 16}, tpu(4, 4), "collective-permute", ("fsdp",), 50),  # to a neighbour
        ({"slice": 2, "fsdp": 16}, tpu(4, 4, 2), "all-reduce", ("slice",), 3.1),
        ({"slice": 2, "fsdp": 16}, tpu(4, 4, 2), "all-reduce", ("slice", "fsdp"), 49.6),
        ({"fsdp": 16}, tpu(4, 4, core=1), "all-gather", ("fsdp",), 100),  # half a chip each
    ]:
        speeds = chip_speeds(CHIPS["v5e"], mesh, devices)
        assert speeds.link(collective(kind, *axes)) == pytest.approx(1e9 * gigabytes)


def test_a_collective_of_machines_uses_their_networks():
    for mesh, machines, axes, gigabytes in [
        ({"fsdp": 8}, 1, ("fsdp",), 450),
        ({"fsdp": 16}, 2, ("fsdp",), 400),  # eight adapters of 50 a machine
        ({"data": 2, "fsdp": 8}, 2, ("data",), 50),
        ({"data": 2, "fsdp": 8}, 2, ("fsdp",), 450),
    ]:
        speeds = chip_speeds(H100, mesh, gpus(machines, 8))
        assert speeds.link(collective("all-gather", *axes)) == pytest.approx(1e9 * gigabytes)


@pytest.mark.thorough
def test_the_largest_leaves_of_a_plan_are_in_it():
    plan = make_plan(small(), find_topology("cpu:8"))
    sizes = [each.bytes for each in plan.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= plan.peak
    by_role = {each.role: each for each in plan.tensors}
    assert by_role["parameter"].name.startswith("params/")
    assert by_role["optimizer state"].name.startswith("opt_state/")
    made = [each for each in plan.tensors if each.role in ("forward", "backward")]
    assert all(".py:" in each.source for each in made)
    assert made


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(lambda x: jnp.tanh(x @ x)).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))


def test_a_program_in_the_compilation_cache_is_compiled_again(lowered, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    enable_compilation_cache()
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            compile_step(lowered, tmp_path / name)
            found = list((tmp_path / name).glob("*-live-range.txt"))
            assert found, "the buffers at the peak, which a hit of the cache would not write"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
