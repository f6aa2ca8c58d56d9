"""Collectives of split sequences, layers and experts, in programs of the TPU compiler.

As in test_on_tpu.py, bytes are those that a device sends in a step, with all turns of loops. A
permutation sends B bytes; a gather, a scatter and an exchange of B bytes on n devices send
(n - 1) / n B, a reduction twice that.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from made_whole import made_whole
from tpu_programs import (
    ACTIVATION,
    BF16,
    BLOCKS,
    F32,
    GRADIENTS,
    LAYERS,
    TABLES,
    TABLES_GRADIENTS,
    WIDTH,
    bytes_of,
    crossing,
    heard,
    near,
    planned,
    sent,
)

from jtrain.inspect.plan.collectives import sum_by_axes
from jtrain.inspect.plan.topology import find_topology
from jtrain.parallel.mesh import make_mesh

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("from_the_top")]


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


def test_rematerialization_of_an_unsharded_array_is_reported():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, find_topology("v5e:2x4").devices)
    lay = lambda x, *axes: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(*axes)))

    def awkward(x):
        there = jnp.sin(lay(x, "data", None, "tensor"))
        return lay(2 * there.reshape(64, 48), ("data", "tensor", "fsdp"))

    with heard() as said:
        jax.jit(awkward).lower(jax.ShapeDtypeStruct((64, 8, 6), jnp.float32)).compile()
    assert made_whole(said)
