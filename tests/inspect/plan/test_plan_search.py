"""A search ranks what it compiled and resumes; the advice of a step that does not fit works."""

import json
import shlex
from types import SimpleNamespace

import pytest
from small_plans import CONFIG, SMALL, small

from jtrain.cli import main
from jtrain.inspect.plan import advice
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.search import Estimates, candidates, current, with_chosen_layout
from jtrain.inspect.plan.topology import find_topology
from jtrain.train.program import set_up
from jtrain.train.summary import count_step_flops

CPU = ["plan", str(CONFIG), *SMALL, "--topology", "cpu:8"]


@pytest.mark.thorough
def test_candidates_divide_the_rows_and_name_what_changes():
    config, topology = small(), find_topology("cpu:8")
    found = list(candidates(config, Estimates(config, topology)))
    assert len(set(found)) == len(found)
    assert found[0].parallel == config.parallel
    for each in (each for each in found if each.parallel != config.parallel):
        sizes = each.parallel
        rows = sizes.data * sizes.fsdp * sizes.expert * each.microbatches
        assert config.batch % rows == 0
        assert sizes.data * sizes.fsdp * sizes.tensor * sizes.context * sizes.expert == 8
    remats = {(each.remat, each.saved) for each in found}
    assert ("full", ()) in remats
    assert ("names", ("qkv", "attention")) in remats
    assert current(config).apply(config) == config
    chosen = with_chosen_layout(small("parallel.kind=auto"), topology)
    assert Estimates(chosen, topology).memory(current(chosen)) > 0


@pytest.mark.thorough
def test_a_search_ranks_and_resumes_and_its_settings_train(capsys):
    words = [*CPU, "--search", "--compiles", "3", "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first["rows"]) == 3
    assert sum(row["default"] for row in first["rows"]) == 1
    fit = [row["seconds"] for row in first["rows"] if row["fits"]]
    assert fit == sorted(fit)
    best = small(*shlex.split(first["best"]))
    assert make_plan(best, find_topology("cpu:8")).cached  # the step that was ranked first
    assert main(words) == 0
    second = capsys.readouterr()
    assert second.err.count("(cached)") == 3


@pytest.mark.thorough
def test_the_largest_batch_fits_and_the_next_does_not(capsys):
    peak = make_plan(small("batch=48"), find_topology("cpu:8")).peak
    words = [*CPU, "--largest-batch", "--json", f"--memory={1.001 * peak / 1e9:.9f}"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == 48
    assert found["proved"]
    assert found["peaks"]["56"] > 1.001 * peak >= found["peaks"]["48"]
    assert len(found["peaks"]) <= 6


@pytest.mark.thorough
def test_the_largest_batch_divides_into_the_microbatches_of_a_pipeline(monkeypatch):
    parallel = {"kind": "sharded", "stage": 2, "data": 2, "fsdp": 1, "stage_batches": 4}
    words = [f"parallel.{key}={value}" for key, value in parallel.items()]
    config = small("model.layers=2", "model.scan=true", "parallel.devices=4", *words)

    def by_shapes(config, topology):
        count_step_flops(set_up(config, among=topology.devices))  # traces the loss
        return SimpleNamespace(peak=1000 * config.batch, fits=config.batch <= 580)

    monkeypatch.setattr(advice, "make_plan", by_shapes)
    topology = find_topology("cpu:4")._replace(limit=580_000)
    found = advice.find_largest_batch(config, topology)
    assert (found.batch, found.step, found.proved) == (576, 8, True)


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
    assert main([*run(0.6 * peak, *shlex.split(first["settings"])), "--json"]) == 0
    smaller = json.loads(capsys.readouterr().out)
    saved = found["memory"]["peak"] - smaller["memory"]["peak"]
    assert saved >= 0.4 * peak


@pytest.mark.compiler
def test_a_tpu_that_is_too_small_gives_a_plan_and_no_stack_trace(capsys, pytestconfig):
    words = ["plan", str(pytestconfig.rootpath / "configs/llama2_7b.yaml"), "model.layers=4"]
    words += ["--topology", "v5e:1x1", "parallel.kind=mirrored", "batch=1", "evaluate.batch=1"]
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak"] > found["memory"]["limit"] > 0
    assert found["tensors"]
    assert found["advice"]
