"""The sharding table has the shardings of the arrays, and a reason for each."""

import json
import math
from pathlib import Path

import pytest
from quick_study import config_of

from jtrain.cli import main
from jtrain.core.pytree import named_leaves
from jtrain.inspect.sharding_table import describe_sharding, format_sharding, group_leaves
from jtrain.train.program import Program, set_up

CONFIG = Path(__file__).parents[2] / "configs/shakespeare.yaml"
SMALL = ["batch=16", "data.context=32", "model.context=32", "model.layers=2", "model.width=64"]
AXES = "parallel={kind: sharded, fsdp: 4, tensor: 2, min_size: 1000}"


@pytest.fixture(scope="module")
def program() -> Program:
    return set_up(config_of(CONFIG, [*SMALL, "model.heads=4", AXES]))


@pytest.mark.thorough
def test_bytes_and_axes_are_those_of_the_arrays(program):
    found, like = describe_sharding(program), named_leaves(program.resolved.abstract_state)
    assert [sharding.leaf for sharding in found.leaves] == list(like)
    for sharding in found.leaves:
        leaf = like[sharding.leaf]
        part = leaf.sharding.shard_shape(leaf.shape)
        assert sharding.bytes == math.prod(part) * leaf.dtype.itemsize
        assert sharding.full_bytes == leaf.size * leaf.dtype.itemsize
        by_axes = [math.prod(found.axes[a] for a in axes) for axes in sharding.axes]
        assert part == tuple(n // by for n, by in zip(leaf.shape, by_axes, strict=True))
    assert found.total == sum(sharding.full_bytes for sharding in found.leaves)
    assert found.device == sum(sharding.bytes for sharding in found.leaves) < found.total / 3


def test_equal_layers_share_a_line_with_the_reason(program):
    lines = {
        line.split("  ")[0]: line
        for line in format_sharding(describe_sharding(program)).splitlines()
    }
    up = lines["params/blocks/*/up/kernel x 2"]
    assert "64 x 256" in up
    assert "fsdp, tensor" in up
    assert up.endswith("hidden -> tensor, width -> fsdp")
    assert lines["params/tokens"].endswith("width -> fsdp; vocab 63 is not a multiple of tensor 2")
    assert lines["params/norm/scale"].endswith("fewer than 1000 elements")
    assert lines["seed"].endswith("fewer than 1000 elements")
    groups = group_leaves(describe_sharding(program).leaves)
    assert sum(len(group) for _, group in groups) == len(
        named_leaves(program.resolved.abstract_state)
    )
    assert "opt_state/1/0/0/mu/blocks/*/up/kernel" in [name for name, _ in groups]


@pytest.mark.thorough
def test_the_command_shows_the_sharding_on_named_devices(capsys):
    words = [str(CONFIG), *SMALL, "--sharding", "--topology", "cpu:4", "parallel.kind=fsdp"]
    assert main(["show", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axes"] == {"fsdp": 4}
    assert found["device_bytes"] == sum(leaf["device_bytes"] for leaf in found["leaves"])
    (tokens,) = [leaf for leaf in found["leaves"] if leaf["leaf"] == "params/blocks/0/up/kernel"]
    assert tokens["split"] == [["fsdp"], []]
    assert tokens["rule"] == "width -> fsdp"
    assert main(["show", *words]) == 0
    assert "fsdp: fsdp 4, 4 devices" in capsys.readouterr().out


def test_a_topology_without_sharding_raises(capsys):
    assert main(["show", str(CONFIG), "--topology", "cpu:4"]) == 2
    assert "--sharding --topology cpu:4" in capsys.readouterr().err
