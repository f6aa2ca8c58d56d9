"""The summary gives the sizes of a run by shapes, and the bytes on one device."""

import json
import math
from pathlib import Path

import jax
import pytest
from quick_study import config_of, write_study

from jtrain.cli import main
from jtrain.train.setup import set_up
from jtrain.train.summary import count_step_flops, format_line, format_table, summarize


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_study(tmp_path)


FSDP = "parallel={kind: fsdp, devices: 4, min_size: 0}"


def test_sizes_are_those_of_the_arrays(path: Path):
    parts = set_up(config_of(path, ["model.width=16", FSDP]))
    sizes, state = summarize(parts.like), parts.fresh()
    first = jax.devices()[0]

    def held(tree):
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
        return sum(s.data.nbytes for s in shards if s.device == first)

    for part, tree in [(sizes.params, state.params), (sizes.optimizer, state.opt_state)]:
        assert part.total == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        assert part.device == held(tree)
    assert sizes.params.device < sizes.params.total
    assert sizes.numbers == 2 * 16 + 16 + 16 * 3
    assert {leaf.name: leaf.shape for leaf in sizes.leaves}["up"] == (2, 16)
    assert all(math.prod(leaf.shape) == leaf.numbers for leaf in sizes.leaves)


def test_the_work_is_that_of_the_whole_batch_however_it_is_split(path: Path):
    # x W, and its gradient by W alone; h V and its gradients by h and V.
    by_hand = 2 * 16 * (2 * 2 * 8 + 3 * 8 * 3)
    for settings in [], ["microbatches=4"], ["steps_per_call=2", "evaluate.every=4"], [FSDP]:
        changes = [*settings, "checkpoint.every=0", "optimizer.kind=sgd"]
        assert count_step_flops(set_up(config_of(path, changes))) == (by_hand, by_hand)


def test_the_verb_prints_modules_leaves_and_sums(path: Path, capsys):
    assert main(["show", str(path), "--model"]) == 0
    out = capsys.readouterr().out
    assert "up    2 x 8  float32" in out
    assert "parameters  48 in 3 leaves" in out
    assert "params      192 B, 192 B of it on a device" in out
    assert "FLOP in products of loss and gradient" in out


def test_json_is_in_bytes_and_operations(path: Path, capsys):
    assert main(["show", str(path), "--model", "--json", "model.width=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 24
    assert found["bytes"]["params"] == {"total": 96, "device": 96}
    assert found["flops"] == 2 * 16 * (2 * 2 * 4 + 3 * 4 * 3)
    assert found["leaves"][0] == {
        "name": "bias", "shape": [4], "shard": [4], "dtype": "float32",
        "numbers": 4, "bytes": 16, "device_bytes": 16,
    }  # fmt: skip


def test_leaves_are_listed_below_their_module_and_a_run_logs_the_sums(path: Path):
    nested = path.parent.parent / "experiments" / "nested.py"
    code = (nested.parent / "quick.py").read_text()
    code = code.replace('"up": jax', '"block": {"up": jax').replace("width)),", "width))},", 1)
    nested.write_text(code.replace('params["up"]', 'params["block"]["up"]'))
    path.write_text(path.read_text().replace("experiment: quick", "experiment: nested"))
    sizes = summarize(set_up(config_of(path)).like)
    lines = [line.split()[0] for line in format_table(sizes).splitlines()[:5]]
    assert lines == ["leaf", "bias", "down", "block", "up"]
    assert format_table(sizes).splitlines()[4].startswith("  up")
    assert format_line(sizes).startswith("3 leaves of 192 B, ")
