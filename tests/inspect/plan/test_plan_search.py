"""A search ranks what it compiled, resumes from the cache, and writes a config that resolves."""

import json
from types import SimpleNamespace

import pytest
from small_plans import CONFIG, SMALL, small

from jtrain.cli import main
from jtrain.cli.plan import _progress
from jtrain.config.resolve import resolve
from jtrain.errors import STOPPED
from jtrain.inspect.plan import largest_batch
from jtrain.inspect.plan import search as search_module
from jtrain.inspect.plan.candidates import Costs, candidates, current
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.search import format_search, search
from jtrain.inspect.plan.topology import find_topology
from jtrain.train.hooks.live_line import NotebookLine
from jtrain.train.setup import set_up
from jtrain.train.summary import count_step_flops

CPU = ["plan", str(CONFIG), *SMALL, "--topology", "cpu:8"]


def test_candidates_divide_the_rows_and_name_what_changes():
    config, topology = small(), find_topology("cpu:8")
    found = list(candidates(config, topology, Costs(config, topology)))
    assert len(set(found)) == len(found)
    for each in found:
        sizes = each.parallel
        rows = sizes.data * sizes.fsdp * sizes.expert * each.microbatches
        assert config.batch % rows == 0
        assert sizes.data * sizes.fsdp * sizes.tensor * sizes.context * sizes.expert == 8
    remats = {(each.remat, each.saved) for each in found}
    assert ("full", ()) in remats
    assert ("names", ("qkv", "attention")) in remats
    assert current(config).apply(config) == config


@pytest.mark.thorough
def test_a_search_ranks_and_resumes_and_writes(tmp_path, capsys):
    file = tmp_path / "best.yaml"
    words = [*CPU, "--search", "--compiles", "3", "--json"]
    assert main([*words, "--write", str(file)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first["rows"]) == 3
    assert sum(row["default"] for row in first["rows"]) == 1
    fit = [row["seconds"] for row in first["rows"] if row["fits"]]
    assert fit == sorted(fit)
    assert first["rows"][0]["pareto"]
    written = resolve(file).config
    assert {key: getattr(written, key) for key in ("batch", "steps")} == {
        "batch": 16,
        "steps": 1000,
    }
    assert make_plan(written, find_topology("cpu:8")).cached  # the step that was ranked first
    assert main(words) == 0
    second = capsys.readouterr()
    assert second.err.count("(cached)") == 3
    assert main([*words, "--write", str(file)]) == 2
    assert "the file exists" in capsys.readouterr().err


@pytest.mark.thorough
def test_ctrl_c_keeps_what_is_done(monkeypatch):
    made = []

    def interrupted(config, topology):
        if made:
            raise KeyboardInterrupt
        made.append(make_plan(config, topology))
        return made[0]

    monkeypatch.setattr(search_module, "make_plan", interrupted)
    result = search(small(), find_topology("cpu:8"))
    assert result.stopped
    assert [row.plan for row in result.rows] == made
    assert "resumes from the cache" in format_search(result)


def test_ctrl_c_before_the_first_program_says_so(monkeypatch, capsys):
    def interrupted(config, topology):
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "make_plan", interrupted)
    assert main([*CPU, "--search"]) == STOPPED
    assert "stopped before the first program" in capsys.readouterr().err


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


def test_the_largest_batch_divides_into_the_microbatches_of_a_pipeline(monkeypatch):
    parallel = {"kind": "sharded", "stage": 2, "data": 2, "fsdp": 1, "stage_batches": 4}
    words = [f"parallel.{key}={value}" for key, value in parallel.items()]
    config = small("model.layers=2", "model.scan=true", "parallel.devices=4", *words)

    def by_shapes(config, topology):
        count_step_flops(set_up(config, among=topology.devices))  # traces the loss
        return SimpleNamespace(peak=1000 * config.batch, fits=config.batch <= 580)

    monkeypatch.setattr(largest_batch, "make_plan", by_shapes)
    topology = find_topology("cpu:4")._replace(limit=580_000)
    found = largest_batch.find_largest_batch(config, topology)
    assert (found.batch, found.step, found.proved) == (576, 8, True)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--search", "--compiles", "0"], "--compiles 12"),
        (["--memory", "-1"], "--memory 16"),
        (["--memory", "0"], "--memory 16"),
        (["--memory", "nan"], "--memory 16"),
    ],
)
def test_numbers_of_no_plan_are_refused(words, advice, capsys):
    assert main([*CPU, *words]) == 2
    assert advice in capsys.readouterr().err


def test_a_terminal_gets_a_bar_and_a_file_lines(monkeypatch, capsys):
    with _progress(12) as report:
        report("3: fits", 3)
    assert capsys.readouterr().err == "3: fits\n"
    monkeypatch.setattr("jtrain.train.hooks.live_line.live_line_for", lambda stream: NotebookLine)
    with _progress(12) as report:
        report("3: fits", 3)
    shown = capsys.readouterr().err
    assert "3: fits\n" in shown
    assert "━━━━━───────────────  3 of 12 programs" in shown


def test_without_a_memory_there_is_no_largest_batch(capsys):
    assert main([*CPU, "--largest-batch"]) == 2
    assert "write --memory GB" in capsys.readouterr().err
    assert main([*CPU, "--write", "best.yaml"]) == 2
    assert "add --search or --largest-batch" in capsys.readouterr().err
