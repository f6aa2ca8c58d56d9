"""Statistics of leaves are those of the next step, under any strategy."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_study import at_home, config_of, trained, write_study

from jtrain.core.pytree import named_leaves
from jtrain.core.step import make_step
from jtrain.io.jsonl import read_rows
from jtrain.train.leaf_statistics import KINDS, LeafStatistics
from jtrain.train.setup import set_up

pytestmark = pytest.mark.thorough

SGD = ["optimizer={kind: sgd, lr: 0.1}"]


@pytest.fixture
def path(tmp_path: Path, tmp_path_factory, monkeypatch) -> Path:
    at_home(tmp_path, monkeypatch, tmp_path_factory.getbasetemp() / "compiled")
    return write_study(tmp_path)


def by_hand(parts, state, batch) -> dict[str, dict[str, float]]:
    """Return the statistics by numpy's gradient in a step of plain descent."""
    step = make_step(parts.loss, parts.experiment.transformation)
    after, _ = jax.jit(step)(state, batch)
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    leaves = named_leaves(jax.device_get(after.params))
    for name, before in named_leaves(jax.device_get(state.params)).items():
        update = leaves[name] - before
        size, held = float(np.linalg.norm(update)), float(np.linalg.norm(before))
        found["update_norm"][name], found["param_norm"][name] = size, held
        found["grad_norm"][name] = size / 0.1
        found["grad_max"][name] = float(np.abs(update).max()) / 0.1
        found["ratio"][name] = size / held if held else float("nan")
    return found


STRATEGIES = [
    "parallel={kind: fsdp, devices: 4, min_size: 0}",
    pytest.param("parallel={kind: single}", marks=pytest.mark.slow),
    pytest.param("parallel={kind: mirrored, devices: 4}", marks=pytest.mark.slow),
    pytest.param("parallel={kind: mirrored, devices: 4, impl: shard_map}", marks=pytest.mark.slow),
    pytest.param("parallel={kind: mirrored, devices: 4, impl: pmap}", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_the_statistics_are_those_of_the_next_step(parallel: str, path: Path):
    parts = set_up(config_of(path, [*SGD, parallel, "microbatches=2", "checkpoint.every=0"]))
    alone = set_up(config_of(path, [*SGD, "checkpoint.every=0", "steps_per_call=1"]))
    found = LeafStatistics(parts)(3, parts.fresh())
    expected = by_hand(alone, alone.fresh(), alone.place(alone.experiment.train[3]))
    assert list(found) == list(KINDS)
    for kind in KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-4, nan_ok=True), kind


def test_a_gradient_that_is_not_finite_is_reported(path: Path):
    parts = set_up(config_of(path, [*SGD]))
    state = parts.fresh()
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), state.params)
    found = LeafStatistics(parts)(0, type(state)(**{**vars(state), "params": broken}))
    assert np.isnan([x for each in found.values() for x in each.values()]).all()


def test_a_run_writes_them_at_their_cadence_and_takes_the_same_steps(path: Path):
    plain = trained(path, "name=plain", "checkpoint.every=4")
    asked = trained(path, "name=asked", "checkpoint.every=4", "log.leaves=4")
    rows = read_rows(asked.directory.leaves)
    assert [row["step"] for row in rows] == [4, 8]  # nothing follows step 12
    assert set(rows[0]) == {"step", *KINDS}
    assert set(rows[0]["ratio"]) == {"up", "bias", "down"}
    assert not plain.directory.leaves.exists()
    assert asked.directory.metrics.read_bytes() == plain.directory.metrics.read_bytes()


def test_what_is_not_finite_is_written_as_json_has_it(path: Path, tmp_path: Path):
    from jtrain.train.hooks.leaf_log import LeafLog

    file = tmp_path / "leaves.jsonl"
    leaves = LeafLog(file, every=1, stop=3, look=lambda step, state: {"ratio": {"w": float("nan")}})
    leaves.on_state(1, None, {})
    leaves.on_state(3, None, {})
    leaves.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "ratio": {"w": "NaN"}}
    ]
    assert np.isnan(read_rows(file)[0]["ratio"]["w"])


def test_a_cadence_within_a_call_is_refused(path: Path):
    with pytest.raises(ValueError, match=r"log.leaves.*3 is no multiple of steps_per_call"):
        config_of(path, ["steps_per_call=2", "checkpoint.every=4", "log.leaves=3"])
