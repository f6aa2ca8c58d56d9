"""A step that does not fit gives advice, and the advice works."""

import json
import shlex

import pytest
from small_plans import CONFIG, SMALL, small

from jtrain.cli import main
from jtrain.inspect.plan.advice import _smallest_layout, advise, format_advice
from jtrain.inspect.plan.candidates import Costs
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.topology import find_topology

LARGE = ("batch=128", "model.width=64")


@pytest.fixture(scope="module")
def peak() -> int:
    return make_plan(small(*LARGE), find_topology("cpu:8")).peak


def run(peak: float, *words: str) -> list[str]:
    memory = f"--memory={peak / 1e9:.9f}"
    return ["plan", str(CONFIG), *SMALL, *LARGE, *words, "--topology", "cpu:8", memory]


@pytest.mark.thorough
def test_the_first_advice_makes_the_step_fit(peak, capsys):
    assert main([*run(0.6 * peak), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["memory"]["headroom"] < 0
    first = found["advice"][0]
    assert first["fits"]
    assert first["compiled"]
    assert main([*run(0.6 * peak, *shlex.split(first["settings"])), "--json"]) == 0
    smaller = json.loads(capsys.readouterr().out)
    saved = found["memory"]["peak"] - smaller["memory"]["peak"]
    assert saved == first["saves"] >= 0.4 * peak


@pytest.mark.thorough
def test_the_text_has_the_advice_and_the_exit_code_says_that_it_does_not_fit(peak, capsys):
    assert main(run(0.6 * peak)) == 1
    out = capsys.readouterr().out
    assert "it does not fit" in out
    assert "more than a device has. Savings, estimated by shapes:" in out
    assert main(run(1.01 * peak)) == 0
    assert "free" in capsys.readouterr().out


@pytest.mark.thorough
def test_nothing_that_saves_too_little_is_called_enough(peak):
    topology = find_topology("cpu:8")._replace(limit=1000)
    plan = make_plan(small(*LARGE), topology)
    found = advise(small(*LARGE), topology, plan)
    assert found
    assert not any(each.fits for each in found)
    assert "None is enough" in format_advice(found, plan)
    saves = [each.saves for each in found]
    assert saves == sorted(saves, reverse=True)


def test_layouts_are_advised_for_any_saved_tensors():
    config, topology = small("model.remat=names", "model.saved=[attention]"), find_topology("cpu:4")
    layout = _smallest_layout(config, topology, Costs(config, topology), offload=False)
    assert layout is not None
    assert layout.fsdp == 4


@pytest.mark.compiler
def test_a_tpu_that_is_too_small_gives_a_plan_and_no_stack_trace(capsys, pytestconfig):
    words = ["plan", str(pytestconfig.rootpath / "configs/llama2_7b.yaml"), "model.layers=4"]
    words += ["--topology", "v5e:1x1", "parallel.kind=mirrored", "batch=1", "evaluate.batch=1"]
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak"] > found["memory"]["limit"] > 0
    assert found["tensors"]
    assert found["advice"]
