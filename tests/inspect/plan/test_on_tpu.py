"""Programs of the TPU compiler: collectives against the textbook, and memory.

The tests need libtpu, `pip install 'jtrain[plan]'`, and no TPU: `pytest -m compiler`. Bytes are
those that a device sends in a step, with all turns of loops: for an array of B bytes on n devices a
gather, a scatter or an exchange sends (n - 1) / n B, a reduction twice that, a permutation B.
"""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_programs import (
    ACTIVATION,
    BF16,
    BLOCKS,
    F32,
    GRADIENTS,
    HIDDEN,
    LAYERS,
    SMALL,
    TABLES,
    TABLES_GRADIENTS,
    VOCAB,
    WIDTH,
    bytes_of,
    crossing,
    near,
    planned,
    sent,
    sum_by_axes,
)

from jtrain.config.resolve import resolve
from jtrain.core.state import new_state
from jtrain.inspect.plan.collectives import collectives_of
from jtrain.inspect.plan.compile import compile_step, read_dump
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.topology import find_topology
from jtrain.parallel.mesh import host_order, order_devices
from jtrain.parallel.strategies.sharded import Sharded
from jtrain.train.program import set_up

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("from_the_top")]


def test_data_parallel_sends_the_gradients_once():
    found = sent(planned("v5e:2x4", "parallel.kind=mirrored"), "data")
    assert near(sum(found.values()), 2 * 7 / 8 * GRADIENTS)
    assert set(found) == {"all-reduce"}


def test_zero_3_sends_the_weights_twice_and_the_gradients_once():
    found = sent(planned("v5e:2x4", "parallel.kind=fsdp"), "fsdp")
    weights, gradients = 2 * BLOCKS * BF16 * 7 / 8, (BLOCKS * BF16 + VOCAB * WIDTH * F32) * 7 / 8
    assert near(found["all-gather"], weights + VOCAB * WIDTH * BF16 * 7 / 8)  # the head once
    # A small leaf's gradient is reduced with others', not scattered: as if sent twice.
    assert near(found["reduce-scatter"] + found["all-reduce"] / 2, gradients, 0.1)
    # What was looked up in parts of the table, forth and back.
    assert found["all-to-all"] < 2 * ACTIVATION / 8 * 1.05
    assert near(sum(found.values()), weights + gradients, 0.1), "nothing more crosses"


def test_muon_sends_each_matrix_to_one_device_and_back():
    sums = {}
    for kind in ("adamw", "muon"):
        plan = planned("v5e:2x4", "parallel.kind=fsdp", f"optimizer.kind={kind}")
        sums[kind] = sum(sent(plan, "fsdp").values())
    # Twice the shard, and as much again at most for the zeros that fill the stacks up.
    assert 0 < sums["muon"] - sums["adamw"] <= 2 * 2 * BLOCKS * F32 / 8, sums


def test_zero_1_and_2_gather_the_parameters_once_after_the_update():
    found = sent(planned("v5e:2x4", "parallel.kind=mirrored", "parallel.zero=1"), "fsdp")
    assert near(found["all-gather"], (BLOCKS + TABLES) * F32 * 7 / 8)
    assert near(found["reduce-scatter"] + found["all-reduce"] / 2, BLOCKS * BF16 * 7 / 8, 0.1)


def test_tensor_parallel_sends_two_activations_a_layer_forward_and_two_back():
    words = ("parallel.kind=sharded", "parallel.fsdp=1", "parallel.tensor=8")
    found = sent(planned("v5e:2x4", *words, "parallel.sequence=false"), "tensor")
    # The looked up tokens come from all parts of the table; what the head gives back is float32.
    activations = 4 * LAYERS + 1 + F32 / BF16
    assert near(sum(found.values()), 2 * 7 / 8 * ACTIVATION * activations)
    assert set(found) == {"all-reduce"}


def test_activations_split_in_time_are_gathered_once_more_a_layer_and_take_less_memory():
    words = ("parallel.kind=sharded", "parallel.fsdp=1", "parallel.tensor=8")
    split = planned("v5e:2x4", *words)
    whole = planned("v5e:2x4", *words, "parallel.sequence=false")
    found = sent(split, "tensor")
    once = 7 / 8 * ACTIVATION  # an activation is gathered, or scattered
    # Each reduction became a gather and a scatter; the backward pass needs the saved part whole,
    # for the gradient of the weights that it was multiplied with. The other half of the head's
    # float32 scatter is an exchange.
    assert near(found["all-gather"], once * (4 * LAYERS + 2 + 1 + LAYERS), 0.1)
    assert near(found["reduce-scatter"], once * (4 * LAYERS + 2 + 1), 0.1)
    # What the compiler exchanges of attention's heads for time, going back.
    assert found["all-to-all"] < once * LAYERS
    assert sum(found.values()) < 1.2 * sum(sent(whole, "tensor").values())
    assert split.memory["temporaries"] < 0.6 * whole.memory["temporaries"]


def test_slices_exchange_the_gradient_shards():
    found = planned("2*v5e:2x2", "parallel.kind=sharded", "parallel.slice=2")
    within, between = sent(found, "fsdp"), sent(found, "slice")
    kept = GRADIENTS / 4
    assert near(sum(between.values()), 2 * 1 / 2 * kept, 0.1)
    assert within["reduce-scatter"] > 0.9 * BLOCKS * BF16 * 3 / 4
    assert sum(between.values()) < 0.15 * sum(within.values())


@pytest.mark.parametrize(
    ("words", "parameters", "moments"),
    [
        (["parallel.kind=mirrored", "parallel.zero=1"], 1, 8),
        (["parallel.kind=fsdp"], 8, 8),
    ],
    ids=["zero 1", "zero 3"],
)
def test_a_device_has_its_shard_of_the_state(words, parameters, moments):
    found = planned("v5e:2x4", *words)
    whole = (BLOCKS + TABLES) * F32
    shares = whole / parameters + 2 * whole / moments
    assert near(found.leaves, shares, 0.01)
    assert near(found.memory["arguments"], shares)
    assert found.memory["aliased"] > 0.99 * found.leaves, "the state is updated in its place"


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (2, 8)])
def test_the_sums_over_microbatches_are_split_by_zero_2(zero, parts):
    words = ["parallel.kind=mirrored", f"parallel.zero={zero}", "microbatches=2"]
    config = resolve("configs/llama2_7b.yaml", [*SMALL, *words]).config
    step = set_up(config, among=find_topology("v5e:2x4").devices).lower_step()
    carried = [
        math.prod(map(int, dims.split(",")))
        for instruction, *_ in HloProgram(step.compile().as_text()).walk()
        if instruction.operation == "while"
        for dims in re.findall(r"f32\[([\d,]+)\]", instruction.shape)
    ]
    whole = LAYERS * WIDTH * HIDDEN
    assert whole // parts in carried
    assert max(carried) <= max(whole // parts, whole // LAYERS), "at most a layer is whole"


def test_a_new_state_is_never_unsharded_on_a_device():
    path = "configs/llama2_7b.yaml"
    parts = set_up(resolve(path, SMALL).config, among=find_topology("v5e:2x4").devices)
    x = parts.resolved.experiment

    def make():
        params, extra = x.init(jax.random.key(0))
        return new_state(params, x.transformation, jax.random.key(1), extra)

    to = jax.tree.map(lambda leaf: leaf.sharding, parts.resolved.abstract_state)
    memory = jax.jit(make, out_shardings=to).lower().compile().memory_analysis()
    whole = 3 * (BLOCKS + TABLES) * F32
    assert near(memory.output_size_in_bytes, whole / 8, 0.01)
    assert memory.temp_size_in_bytes < whole / 8


def test_llama_2_needs_the_expected_memory():
    """v5e 4x4, batch 1 a chip, 2,048 tokens, AdamW in float32: GB of arguments and temporaries."""
    found = make_plan(resolve("configs/llama2_7b.yaml", []).config, find_topology("v5e:4x4"))
    assert found.memory["arguments"] <= 5.06e9
    assert found.memory["temporaries"] <= 3.0e9
    assert found.peak < found.memory["limit"] / 2


def split(**axes: object) -> str:
    said = ", ".join(f"{axis}: {size}" for axis, size in {"fsdp": 1, **axes}.items())
    return f"parallel={{kind: sharded, {said}}}"


def both_ways(found, kind: str, least: int = 0) -> tuple[int, int]:
    """Return the bytes of the forward and of the backward pass."""
    ways = [crossing(found, kind, back=back, least=least) for back in (False, True)]
    return bytes_of(ways[0]), bytes_of(ways[1])


def test_a_ring_sends_the_keys_and_values_to_all_others():
    found = planned("v5e:2x2", split(context=4, zero=0))
    pair = 2 * ACTIVATION / 4  # the keys and values of a device, as wide as an activation each
    forward, back = both_ways(found, "collective-permute")
    order = ACTIVATION / 4 / 2  # half of what a device has, into the order of the time
    assert near(forward, LAYERS * 3 * pair + order, 0.01)
    # Once more, and their gradients, which travel as they are summed: in float32, with the keys
    # and values to all others but one, and home in one go.
    assert near(back, LAYERS * 3 * (pair + pair * F32 / BF16) + order, 0.01)
    assert near(sent(found, "context").pop("all-reduce"), 2 * 3 / 4 * GRADIENTS, 0.01)
    assert sum_by_axes(found.collectives).keys() == {"context"}
    assert sent(found, "context").keys() == {"collective-permute", "all-reduce"}


def test_ulysses_exchanges_queries_keys_values_and_outputs():
    found = planned("v5e:2x2", split(context=4, context_by="ulysses", zero=0))
    exchanged = LAYERS * 4 * 3 / 4 * ACTIVATION / 4
    assert both_ways(found, "all-to-all") == (exchanged, exchanged)
    assert near(sent(found, "context")["all-reduce"], 2 * 3 / 4 * GRADIENTS, 0.01)
    few = sent(found, "context").get("collective-permute", 0)  # tokens, to leave out the first
    assert few < 1e3
    assert sum_by_axes(found.collectives).keys() == {"context"}
    assert sent(found, "context").keys() <= {"all-to-all", "all-reduce", "collective-permute"}


def test_a_pipeline_sends_a_microbatch_to_the_next_stage_and_one_from_and_to_its_rows():
    batches, turns = 8, 8 + 3
    found = planned("v5e:2x2", split(stage=4, stage_batches=batches))
    microbatch = ACTIVATION / batches
    forward, back = both_ways(found, "collective-permute", least=1000)
    # In a turn each device sends one on, and one to or from the device that has its rows; the last
    # comes home after all. Back the same, with what goes in and what comes out cut and joined.
    assert forward == (2 * turns + 1) * microbatch
    assert (2 * turns + 1) * microbatch <= back <= (2 * turns + 3) * microbatch
    # Its layers are a device's own, and so is their gradient; the tables are over all.
    assert near(sent(found, "stage")["all-reduce"], 2 * 3 / 4 * TABLES_GRADIENTS, 0.01)
    assert sent(found, "stage").get("all-gather", 0) < 1e5
    assert sum_by_axes(found.collectives).keys() == {"stage"}


@pytest.mark.parametrize(
    ("gather", "gathered", "scattered"), [("turn", 2 * 7, 7), ("step", 1, 1)], ids=["turn", "step"]
)
def test_the_weights_of_a_stage_are_gathered_every_turn_or_once(gather, gathered, scattered):
    # The scales of norms stay whole: of them the compiler makes a whole array in between.
    layout = split(stage=4, fsdp=2, gather=gather, min_size=1 + LAYERS * WIDTH)
    found = sent(planned("v5e:2x4", layout), "fsdp")
    stage = BLOCKS / 4 * BF16 / 2  # each device has a half of a stage's
    assert near(found["all-gather"], gathered * stage + TABLES * BF16 / 2, 0.01)
    assert near(found["reduce-scatter"], scattered * stage, 0.01)


def test_a_circular_pipeline_stores_no_weights_for_the_backward_pass():
    words = ("model.layers=8", "model.remat=full")
    found = planned("v5e:2x2", split(stage=4, stage_batches=8, repeats=2), *words)
    turns, run = 8 * 2 + 3, BLOCKS / LAYERS * BF16  # a layer a run
    assert found.memory["temporaries"] < turns * run * 2 / 3


def test_experts_send_tokens_to_all_others_and_back():
    words = ("model.experts={kind: dropless, count: 8, top_k: 2}", "model.hidden=1024")
    found = planned("v5e:2x2", split(expert=4, zero=0), *words)
    tokens = LAYERS * 3 / 4 * ACTIVATION
    gathers, scatters = both_ways(found, "all-gather"), both_ways(found, "reduce-scatter")
    assert near(gathers[0], tokens, 0.01)  # and which experts they chose
    assert near(gathers[1], tokens, 0.01)
    assert scatters == (tokens, tokens)
    # Only what experts share is reduced: attention, the router and the tables.
    shared = GRADIENTS - BLOCKS * BF16 + LAYERS * 4 * WIDTH * WIDTH * BF16
    assert near(sent(found, "expert")["all-reduce"], 2 * 3 / 4 * shared, 0.02)
    assert sum_by_axes(found.collectives).keys() == {"expert"}
    assert sent(found, "expert").keys() == {"all-gather", "reduce-scatter", "all-reduce"}


COLUMNS, TOKENS = 1024, 256
SHARD = 64  # rows of the kernel: of less the compiler for v5e:16x16 makes no gather
TORUS = ("v4:4x4x4", "v5p:4x4x4", "v6e:16x16", "tpu7x:4x4x4", "v5e:16x16")


@functools.cache
def chips(where: str) -> tuple:
    return tuple(find_topology(where).devices)


def gathered(ordered: np.ndarray, axes: tuple[str, ...], split: str, tmp_path) -> dict[str, int]:
    """Bytes by kind that gather a weight over an axis and reduce its gradient, of one of them."""
    mesh = Mesh(ordered, axes)
    placed = lambda *names: NamedSharding(mesh, P(*names))
    step = jax.jit(
        jax.grad(lambda w, x: jnp.tanh(x @ jax.lax.with_sharding_constraint(w, placed())).sum()),
        out_shardings=placed(split),
    )
    width = SHARD * mesh.shape[split]
    kernel = jax.ShapeDtypeStruct((width, COLUMNS), jnp.bfloat16, sharding=placed(split))
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
    found = gathered(ordered, ("fsdp",), "fsdp", tmp_path)
    assert found["all-gather"] == SHARD * (len(ordered) - 1) * COLUMNS * 2


def test_the_order_of_hosts_gathers_by_reducing_zeros(tmp_path):
    found = gathered(host_order(chips("v5p:4x4x4")), ("fsdp",), "fsdp", tmp_path)
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
        totals.append(sum(gathered(ordered, tuple(sizes), split, tmp_path / name).values()))
    assert totals[0] <= totals[1]
    assert totals[0] > 0


def test_the_option_for_rings_is_one_that_the_compiler_knows(tmp_path):
    strategy = Sharded(Mesh(order_devices([64], chips("v5p:4x4x4")), ("fsdp",)))
    jitted = jax.jit(lambda x: x.sum(), compiler_options=dict(strategy.compiler_options))
    rows = NamedSharding(strategy.mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=rows)
    compile_step(jitted.lower(x), tmp_path)
    assert strategy.compiler_options
