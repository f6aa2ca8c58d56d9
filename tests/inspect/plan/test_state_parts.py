"""Parts of a state in a plan: what is trained, what is frozen, and what the optimizer adds."""

import math

import jax
import pytest
from small_plans import small

from jtrain.inspect.plan.format import format_plan
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.state_parts import state_parts
from jtrain.inspect.plan.topology import find_topology
from jtrain.train.setup import set_up

LORA = "lora={rank: 2, on: ['*/up/kernel', '*/down/kernel']}"
# Two kernels of 32 x 128 with a term: (32 + 128) x 2 numbers each.
KERNELS, TERMS = 2 * 32 * 128, 2 * (32 + 128) * 2


def parts(*words):
    """Return bytes by name and kind."""
    return {(part.name, part.kind): part.bytes for part in state_parts(set_up(small(*words)))}


def numbers_of_the_model():
    params = set_up(small("parallel.kind=single")).like.params
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def test_a_full_training_has_parameters_and_two_moments():
    found, numbers = parts("parallel.kind=single"), numbers_of_the_model()
    assert found["parameters", ""] == 4 * numbers
    assert 8 * numbers <= found["optimizer", ""] < 8 * numbers + 64  # and a count or two
    assert {name for name, _ in found} == {"parameters", "optimizer", "other"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("frozen", "kind", "each"),
    [
        ("as_is", "float32", 4),
        ("bfloat16", "bfloat16", 2),
        ("int8", "int8", 1 + 4 / 64),
        ("nf4", "nf4", 1 / 2 + 4 / 64),
    ],
)
def test_frozen_weights_are_a_part_by_their_type(frozen, kind, each):
    found = parts("parallel.kind=single", LORA, f"lora.frozen={frozen}")
    rest = 4 * (numbers_of_the_model() - KERNELS)
    assert found["parameters", ""] == 4 * TERMS
    assert 8 * TERMS <= found["optimizer", ""] < 8 * TERMS + 64
    want = {"float32": rest}
    want[kind] = want.get(kind, 0) + each * KERNELS
    assert {kind: size for (name, kind), size in found.items() if name == "frozen"} == want


def test_a_device_has_its_share():
    sharded = parts("parallel={kind: fsdp, devices: 4, min_size: 0}", LORA)
    full = parts("parallel.kind=single", LORA)
    assert sharded["frozen", "float32"] * 4 == full["frozen", "float32"]


def test_state_in_host_memory_says_so():
    words = ("parallel={kind: fsdp, devices: 4, min_size: 0, offload: [opt_state]}",)
    notes = {part.note for part in state_parts(set_up(small(*words))) if part.name == "optimizer"}
    assert "in host memory" in notes


@pytest.mark.parametrize(
    "topology",
    [
        "cpu:4",
        pytest.param("cpu:1", marks=pytest.mark.thorough),
        pytest.param("v5e:4x4", marks=pytest.mark.compiler),
    ],
)
def test_a_plan_prints_them(topology):
    plan = make_plan(small(LORA, "lora.frozen=nf4"), find_topology(topology))
    text = format_plan(plan)
    assert sum(part.bytes for part in plan.parts) == plan.leaves
    lines = [line.split() for line in text.splitlines()]
    row = next(words for words in lines if words[:1] == ["frozen"] and words[-1] == "nf4")
    assert row == ["frozen", "4.61", "kB", "in", "nf4"]  # 8,192 numbers of 0.5625 bytes
    assert plan.plain()["state"][0] == {
        "name": "parameters",
        "kind": "",
        "host": False,
        "bytes": 4 * TERMS,
    }
