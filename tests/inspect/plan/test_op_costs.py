"""Operations and bytes of instructions equal counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.kernel_costs import unknown_kernels
from jtrain.inspect.plan.op_costs import op_cost, op_flops
from jtrain.inspect.plan.schedule import Simulation, Speeds

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


def test_products_of_fp8_are_counted_and_take_the_time_of_their_own_peak():
    program = HloProgram(
        "HloModule m\n\n%fused (a: f32[2], b: f32[2]) -> f32[2] {\n"
        "  %a = bf16[64,32]{1,0} parameter(0)\n  %b = f8e5m2[32,16]{1,0} parameter(1)\n"
        "  %q = f8e4m3fn[64,32]{1,0} convert(%a)\n"
        "  ROOT %d = f32[64,16]{1,0} dot(%q, %b), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n}\n\nENTRY %main (x: f32[2], y: f32[2]) -> f32[2] {\n"
        "  %x = bf16[64,32]{1,0} parameter(0)\n  %y = f8e5m2[32,16]{1,0} parameter(1)\n"
        "  %w = bf16[16,8]{1,0} parameter(2)\n"
        "  %f = f32[64,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused\n"
        "  ROOT %g = f32[64,8]{1,0} dot(%f, %w), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n}\n"
    )
    scope = program.computations["main"]
    narrow, wide = (op_cost(program, "main", scope[name]) for name in "fg")
    assert (narrow.flops, narrow.fp8) == (2 * 64 * 32 * 16,) * 2
    assert (wide.flops, wide.fp8) == (2 * 64 * 16 * 8, 0)
    assert ONE.compute(narrow) == narrow.flops
    assert ONE._replace(fp8=2.0).compute(narrow) == narrow.flops / 2
    assert ONE._replace(fp8=2.0).compute(wide) == wide.flops


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


@pytest.mark.parametrize(
    ("kernel", "products"), [("splash_mha_fwd_residuals", 2), ("splash_mha_dkv", 4), ("other", 0)]
)
def test_attention_kernels_count(kernel, products):
    q, k = "bf16[4,256,64]{2,1,0}", "bf16[4,512,64]{2,1,0}"
    program = call(kernel, {"q": q, "k": k}, q)
    flops = op_flops(program, "main", program.roots["main"])
    assert flops == 2 * products * 4 * 256 * 512 * 64
    assert unknown_kernels(program) == ([] if products else ["other"])


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        ("bf16[96,16]{1,0}", "bf16[2,16,24]{2,1,0}", "bf16[96,24]{1,0}"),
        ("bf16[96,16]{1,0}", "bf16[96,24]{1,0}", "bf16[2,16,24]{2,1,0}"),  # a gradient
    ],
)
def test_products_of_experts_count_their_rows_once(left, right, out):
    groups = {"sizes": "s32[2]{0}"}
    program = call("ragged-dot-none", {**groups, "left": left, "right": right}, out)
    assert op_flops(program, "main", program.roots["main"]) == 2 * 96 * 16 * 24
    counts = call("ragged-dot-metadata", groups, "(s32[2]{0}, s32[8]{0})")
    assert unknown_kernels(program) == unknown_kernels(counts) == []
