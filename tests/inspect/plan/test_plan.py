"""A plan on virtual CPU devices: memory, state, FLOPs, its cache, and the names of topologies."""

import json
import math

import jax
import pytest
from quick_study import CODE, write_study
from small_plans import small

from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError
from jtrain.inspect.plan.compile import read_step
from jtrain.inspect.plan.memory import state_parts
from jtrain.inspect.plan.plan import format_plan, make_plan
from jtrain.inspect.plan.topology import (
    GPU_TARGETS,
    MACHINE_GPUS,
    SLICES,
    find_topology,
)
from jtrain.inspect.sharding_table import describe_sharding
from jtrain.io.formatting import format_bytes
from jtrain.parallel.chips import CHIPS
from jtrain.train.program import set_up

CONFIG = "configs/shakespeare.yaml"
SMALL = ["batch=16", "data.context=32", "model.context=32", "model.layers=1", "model.width=64"]
FSDP = [*SMALL, "parallel.kind=fsdp", "parallel.min_size=0"]


@pytest.mark.thorough
def test_a_plan_has_the_memory_of_the_compiled_step(pytestconfig):
    config = resolve(pytestconfig.rootpath / CONFIG, FSDP).config
    found = make_plan(config, find_topology("cpu:8"))
    parts = set_up(config)
    ran = parts.lower_step().compile().memory_analysis()
    assert found.memory["arguments"] == ran.argument_size_in_bytes
    assert found.memory["temporaries"] == ran.temp_size_in_bytes
    assert found.layout == {"fsdp": 8}
    whole = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.resolved.abstract_state)
    )
    assert whole / 8 <= found.leaves < whole / 8 * 1.05
    assert found.leaves <= found.memory["arguments"] <= found.leaves * 1.05
    said = format_plan(found)
    assert "cpu:8: 8 devices, fsdp 8" in said
    assert format_bytes(found.peak) in said


@pytest.mark.thorough
@pytest.mark.parametrize(("word", "unused"), [("parallel.devices=4", 4), ("parallel.kind=fsdp", 0)])
def test_a_layout_that_leaves_devices_unused_says_so(word, unused):
    plan = make_plan(small(word), find_topology("cpu:8"))
    assert plan.unused == plan.plain()["unused"] == unused
    head, *rest = format_plan(plan).splitlines()
    assert head.startswith(f"cpu:8: {8 - unused} of 8 devices" if unused else "cpu:8: 8 devices")
    assert (f"leaves {unused} devices unused" in rest[0]) == bool(unused)


def test_memory_limits_are_below_the_nominal_memory():
    sold = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 96, "v6e": 32, "tpu7x": 96}  # GiB
    assert all(0.9 * sold[kind] < chip.gib < sold[kind] for kind, chip in CHIPS.items())


def test_an_invalid_topology_raises_with_advice():
    for name, said in [
        ("v5:4x4", r"no compiler for 'v5' here; kinds: cpu, v2, .*v5e"),
        ("cpu:64", r"this process has 8 CPU devices.*host_platform_device_count=64"),
        ("h1000:8", r"no compiler for 'h1000' here; kinds: cpu, .*h100.*did you mean h100"),
        ("h100:16", r"write h100:8, or 2\*h100:8 for 2 machines"),
        ("2*v5e:4x4x4", r"v5e has no slice 4x4x4; there are v5e:1x1, v5e:2x2,"),  # links in a plane
    ]:
        with pytest.raises(ConfigError, match=said):
            find_topology(name)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", list(SLICES))
def test_the_compiler_knows_every_slice(kind):
    for shape in SLICES[kind]:
        assert find_topology(f"{kind}:{shape}").devices


@pytest.mark.compiler
@pytest.mark.parametrize("kind", list(GPU_TARGETS))
def test_machines_have_their_gpus(kind):
    for count in MACHINE_GPUS:
        one, two = find_topology(f"{kind}:{count}"), find_topology(f"2*{kind}:{count}")
        assert len(one.devices) == count
        assert [device.process_index for device in two.devices] == [0] * count + [1] * count
        assert one.limit == int(0.75 * GPU_TARGETS[kind].memory)


@pytest.mark.thorough
def test_a_second_plan_is_the_first_from_the_cache():
    topology = find_topology("cpu:8")
    first, second = make_plan(small(), topology), make_plan(small(), topology)
    assert second.cached
    assert second.plain()["memory"] == first.plain()["memory"]
    assert second.tensors == first.tensors
    assert second.collectives == first.collectives


def test_a_damaged_answer_is_no_answer(tmp_path):
    file = tmp_path / "one.json.gz"
    assert read_step(file) is None
    file.write_bytes(b"\x1f\x8b\x08\x00")
    assert read_step(file) is None


LORA = "lora={rank: 2, on: ['*/up/kernel', '*/down/kernel']}"
# Two kernels of 32 x 128 with a term: (32 + 128) x 2 numbers each.
KERNELS, TERMS = 2 * 32 * 128, 2 * (32 + 128) * 2


def parts(*words):
    """Return bytes by name and kind."""
    return {(part.name, part.kind): part.bytes for part in state_parts(set_up(small(*words)))}


@pytest.mark.thorough
@pytest.mark.parametrize(("frozen", "each"), [("int8", 1 + 4 / 64), ("nf4", 1 / 2 + 4 / 64)])
def test_frozen_weights_are_a_part_by_their_type(frozen, each):
    params = set_up(small("parallel.kind=single")).resolved.abstract_state.params
    numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    found = parts("parallel.kind=single", LORA, f"lora.frozen={frozen}")
    assert found["parameters", ""] == 4 * TERMS
    assert 8 * TERMS <= found["optimizer", ""] < 8 * TERMS + 64
    want = {"float32": 4 * (numbers - KERNELS), frozen: each * KERNELS}
    assert {kind: size for (name, kind), size in found.items() if name == "frozen"} == want


def test_a_device_has_its_share():
    sharded = parts("parallel={kind: fsdp, devices: 4, min_size: 0}", LORA)
    full = parts("parallel.kind=single", LORA)
    assert sharded["frozen", "float32"] * 4 == full["frozen", "float32"]


@pytest.mark.thorough
def test_a_plan_prints_the_parts_of_a_state():
    config, topology = small(LORA, "lora.frozen=nf4"), find_topology("cpu:4")
    plan = make_plan(config, topology)
    text = format_plan(plan)
    assert plan.leaves == describe_sharding(set_up(config, among=topology.devices)).device
    lines = [line.split() for line in text.splitlines()]
    row = next(words for words in lines if words[:1] == ["frozen"] and words[-1] == "nf4")
    assert row == ["frozen", "4.61kB", "in", "nf4"]  # 8,192 numbers of 0.5625 bytes
    assert plan.plain()["state"][0] == {
        "name": "parameters",
        "kind": "",
        "host": False,
        "bytes": 4 * TERMS,
    }


# Halves the points until they are small: how often depends on the data.
LOOP = """            turn = jnp.float32([[0.0, 0.5], [-0.5, 0.0]])
            small = jax.lax.while_loop(
                lambda x: jnp.abs(x).max() > 0.1, lambda x: x @ turn, batch["x"]
            )
            x = jnp.tanh((batch["x"] + small) @ params["up"] + params["bias"][None])
"""
LINE = """            x = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
"""


@pytest.mark.thorough
def test_a_loop_that_depends_on_data_gives_a_lower_bound_with_a_warning(
    tmp_path, monkeypatch, capsys
):
    assert LINE in CODE
    path = write_study(tmp_path, CODE.replace(LINE, LOOP))
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(path), "--topology", "cpu:8"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["flops_exact"]
    first, second, turn = 2 * 16 * 2 * 8, 2 * 16 * 8 * 3, 2 * 16 * 2 * 2
    assert found["model_flops"] == 2 * first + 3 * second + turn
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "at least" in shown
    assert "warning: the loss has loops whose number of turns depends on data" in shown


@pytest.mark.thorough
def test_flops_of_a_plan_are_those_of_its_program():
    plan = make_plan(small("parallel.kind=fsdp", "parallel.min_size=0"), find_topology("cpu:8"))
    assert plan.flops_exact
    assert plan.estimate is not None
    # The compiled products, all of them on one device, and the optimizer's none.
    assert plan.estimate.timeline.flops * 8 == pytest.approx(plan.flops.hardware, rel=0.05)


@pytest.mark.thorough
def test_a_price_gives_the_cost_of_the_run():
    config = small("parallel.devices=4", "steps=64 rows")
    plan = make_plan(config, find_topology("cpu:8"), price=4.5)
    assert plan.estimate is not None
    assert plan.steps == math.ceil(64 / config.batch)
    seconds = plan.steps * plan.estimate.seconds
    assert plan.run_seconds == seconds
    assert plan.dollars == pytest.approx(8 * 4.5 * seconds / 3600)  # 4 unused, and paid
    run = {"steps": plan.steps, "seconds": plan.run_seconds, "dollars": plan.dollars}
    assert plan.plain()["run"] == run
    assert f"{plan.steps} steps of the run: " in format_plan(plan)
    assert f", ${plan.dollars:.2g} at $4.5 per device-hour" in format_plan(plan)
