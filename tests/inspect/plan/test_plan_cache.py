"""The compiler's answer is read from the cache; a cache that cannot be used costs only time."""

import dataclasses
import logging

import pytest
from full_disk import files_of_at_most
from small_plans import small

from jtrain.inspect.plan.compiled_step import CompiledStep, plan_cache, read_step, write_step
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.topology import find_topology

STEP = CompiledStep("ENTRY", {"arguments": 1}, (("dot.1", "", 4),), 2.0)


def test_a_second_plan_is_the_first_from_the_cache():
    topology = find_topology("cpu:8")
    first, second = make_plan(small(), topology), make_plan(small(), topology)
    assert second.cached
    assert second.plain()["memory"] == first.plain()["memory"]
    assert second.tensors == first.tensors
    assert second.collectives == first.collectives


@pytest.mark.thorough
def test_another_config_is_compiled():
    topology = find_topology("cpu:8")
    first, other = make_plan(small(), topology), make_plan(small("batch=32"), topology)
    assert other.memory["temporaries"] > first.memory["temporaries"]


def test_an_answer_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "plans" / "one.json.gz"
    write_step(STEP, file)
    assert read_step(file) == dataclasses.replace(STEP, cached=True)


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\x1f\x8b\x08\x00"])
def test_a_damaged_answer_is_no_answer(tmp_path, content):
    file = tmp_path / "one.json.gz"
    assert read_step(file) is None
    file.write_bytes(content)
    assert read_step(file) is None


def test_without_space_the_plan_is_made_and_the_line_says_what_to_do(tmp_path, caplog):
    file = tmp_path / "one.json.gz"
    with caplog.at_level(logging.WARNING), files_of_at_most(10):
        write_step(STEP, file)
    assert not file.exists()
    assert "the plan is not cached" in caplog.text
    assert "set XDG_CACHE_HOME to another folder" in caplog.text


def test_the_folder_that_the_line_names_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert plan_cache() == tmp_path / "other" / "jtrain" / "plans"
