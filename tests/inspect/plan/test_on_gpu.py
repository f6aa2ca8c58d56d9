"""Plans for absent NVIDIA GPUs by XLA's CUDA compiler: memory and collectives, counted by hand.

The tests need `pip install 'jtrain[plan-gpu]'`, and no GPU: `pytest -m compiler`.
"""

import re

import pytest
from tpu_programs import (
    ACTIVATION,
    BF16,
    BLOCKS,
    CONFIG,
    F32,
    ROWS,
    SMALL,
    TABLES,
    TIME,
    near,
    planned,
    sent,
)

from jtrain.config.resolve import resolve
from jtrain.inspect.plan.collectives import collective_table
from jtrain.inspect.plan.topology import find_topology
from jtrain.train.program import set_up

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("from_the_top")]

FSDP = ("parallel.kind=fsdp", "parallel.min_size=0")


@pytest.mark.parametrize("kind", ["a100", "b200"])
def test_a_step_is_planned_for_a_machine_of_each_kind(kind):
    plan = planned(f"{kind}:8", *FSDP)
    assert (plan.devices, plan.unread, plan.fits) == (8, (), True)
    assert near(plan.memory["arguments"], 3 * (BLOCKS + TABLES) * F32 / 8, 0.05)
    assert 0 < plan.memory["temporaries"] < 2 * (BLOCKS + TABLES) * F32 + 40 * ACTIVATION
    weights = BLOCKS * BF16 * 7 / 8
    # Once or twice: without remat the compiler may keep them for the backward pass.
    assert 0.95 * weights <= sent(plan, "fsdp")["all-gather"] <= 2.4 * weights
    assert near(sent(plan, "fsdp")["reduce-scatter"], weights, 0.3)  # and the tables' gradients
    assert plan.estimate is not None
    assert 0 < plan.mfu < 1
    assert plan.tensors[0].bytes > 0


def test_some_collectives_run_beside_computation():
    rows = collective_table(planned("h100:8", *FSDP).collectives)
    assert 0 < sum(row.overlapped for row in rows) <= sum(row.sent for row in rows)


def test_two_machines_send_as_much_and_wait_longer():
    one, two = planned("h200:8", *FSDP), planned("2*h200:4", *FSDP)
    assert two.devices == 8
    assert near(sum(sent(two, "fsdp").values()), sum(sent(one, "fsdp").values()), 0.05)
    assert two.estimate.timeline.links > 1.9 * one.estimate.timeline.links  # 4 x 50 GB/s, not 450
    assert near(two.estimate.timeline.compute, one.estimate.timeline.compute, 0.05)


def test_data_parallel_sends_the_gradients_once():
    plan = planned("h100:8", "parallel.kind=mirrored")
    total = sum(sent(plan, "data").values())
    gradients = (BLOCKS + TABLES) * F32
    assert 0.45 * 2 * gradients * 7 / 8 <= total <= 1.3 * 2 * gradients * 7 / 8
    assert set(sent(plan, "data")) == {"all-reduce"}


def test_one_gpu_sends_nothing_and_copies_no_state():
    plan = planned("h100:1")
    assert not plan.collectives
    assert plan.memory["host"] == 0
    state = 3 * (BLOCKS + TABLES) * F32
    assert near(plan.memory["aliased"], state, 0.01)


TENSOR = ("precision.kind=fp8", "precision.scaling=tensor")


@pytest.mark.parametrize(("words", "products"), [(("precision.kind=fp8",), 2), (TENSOR, 3)])
def test_products_of_fp8_take_half_the_time_of_those_in_bfloat16(words, products):
    narrow, wide = planned("h100:1", *words), planned("h100:1")
    assert near(narrow.estimate.timeline.flops, wide.estimate.timeline.flops, 0.02)
    # Of the three products of the linear layers; not the head, not attention.
    linear = products * 2 * BLOCKS * ROWS * TIME  # a multiplication and an addition
    saved = linear / 989e12 - linear / 1979e12
    assert near(wide.estimate.timeline.compute - narrow.estimate.timeline.compute, saved, 0.02)


def test_with_a_scale_for_each_array_a_linear_layer_is_three_products_of_cublaslt_in_fp8():
    words = [*SMALL, *TENSOR, "model.layers=2", "model.scan=false"]
    program = set_up(resolve(CONFIG, words).config, among=find_topology("h100:1").devices)
    # On a GPU XLA takes the faster of Triton and cuBLASLt; without one it takes Triton if it may.
    # Products of the same factor are merged below a size: gate and up.
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    text = program.lower_step().compile(compiler_options=options).as_text() or ""
    found = re.findall(r"= \((\w+)\[\S+ .* custom-call\(.*__cublas\$lt\$matmul\$f8", text)
    linear = 5  # qkv, out, gate, up, down
    # In bfloat16, as each has its scale as an argument: nothing is left to do in float32.
    assert found == ["bf16"] * (2 * linear * 3)
