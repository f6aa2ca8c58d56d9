"""A plan of a run on virtual CPU devices, and the errors of invalid plans."""

import importlib.util
import json
import os
import sys

import jax
import pytest
from small_plans import small

from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError
from jtrain.inspect.plan.format import format_bytes, format_plan
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.topology import find_topology, prepare_environment
from jtrain.parallel.chips import CHIPS
from jtrain.train.setup import set_up

CONFIG = "configs/shakespeare.yaml"
SMALL = ["batch=16", "data.context=32", "model.context=32", "model.layers=1", "model.width=64"]
FSDP = [*SMALL, "parallel.kind=fsdp", "parallel.min_size=0"]


def test_a_plan_has_the_memory_of_the_compiled_step(pytestconfig):
    config = resolve(pytestconfig.rootpath / CONFIG, FSDP).config
    found = make_plan(config, find_topology("cpu:8"))
    parts = set_up(config)
    ran = parts.lower_step().compile().memory_analysis()
    assert found.memory["arguments"] == ran.argument_size_in_bytes
    assert found.memory["temporaries"] == ran.temp_size_in_bytes
    assert found.layout == {"fsdp": 8}
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.like))
    assert whole / 8 <= found.leaves < whole / 8 * 1.05
    assert found.leaves <= found.memory["arguments"] <= found.leaves * 1.05
    said = format_plan(found)
    assert "cpu:8: 8 devices, fsdp 8" in said
    assert format_bytes(found.peak) in said


@pytest.mark.thorough
def test_the_command_prints_one_object(capsys, pytestconfig):
    path = str(pytestconfig.rootpath / CONFIG)
    assert main(["plan", path, *SMALL, "--topology", "cpu:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == path
    assert found["layout"] == {"data": 2}
    assert set(found["memory"]) >= {"arguments", "temporaries", "output", "aliased", "limit"}
    assert found["collectives"]["data"]["all-reduce"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e", r"is not a topology: write KIND:SHAPE, such as v5e:4x4"),
        ("v5:4x4", r"no compiler for 'v5' here; kinds: cpu, v2, .*v5e"),
        ("2*cpu:4", r"a CPU has one number of devices; write cpu:8"),
        ("cpu:64", r"this process has 8 CPU devices.*host_platform_device_count=64"),
    ],
)
def test_an_invalid_topology_raises_with_advice(name, said):
    with pytest.raises(ConfigError, match=said):
        find_topology(name)


def test_a_missing_compiler_raises_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ConfigError, match=r"pip install 'jtrain\[plan\]'|knows no such slice"):
        find_topology("v5e:3x5")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the first word is a config file"),
        (["configs/x.yaml"], "devices are missing. Write jtrain plan configs/x.yaml --topology"),
    ],
)
def test_missing_arguments_are_named(words, said, capsys):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        pytest.param(["parallel.kind=single"], 7, marks=pytest.mark.thorough),
        (["parallel.devices=4"], 4),
        (["parallel.kind=fsdp"], 0),
    ],
    ids=["single", "four", "fsdp"],
)
def test_a_layout_that_leaves_devices_unused_says_so(words, unused):
    plan = make_plan(small(*words), find_topology("cpu:8"))
    assert plan.unused == plan.plain()["unused"] == unused
    head, *rest = format_plan(plan).splitlines()
    assert head.startswith(f"cpu:8: {8 - unused} of 8 devices" if unused else "cpu:8: 8 devices")
    assert (f"leaves {unused} devices unused" in rest[0]) == bool(unused)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler_the_line_that_installs_it_is_named(capsys):
    assert main(["plan", "configs/digits.yaml", "--topology", "v5e:4x4"]) == 2
    assert "is not installed: pip install 'jtrain[plan]'" in capsys.readouterr().err


def test_memory_limits_are_below_the_nominal_memory():
    sold = {"v2": 8, "v3": 16, "v4": 16, "v5e": 16, "v5p": 96, "v6e": 32, "tpu7x": 96}  # GiB
    assert all(0.9 * sold[kind] < chip.gib < sold[kind] for kind, chip in CHIPS.items())


def test_device_settings_of_the_environment_stay(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    prepare_environment("cpu:2")  # the flags say eight
    assert "JAX_NUM_CPU_DEVICES" not in os.environ
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    prepare_environment("cpu:2")
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "3"
