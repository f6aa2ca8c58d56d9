"""A run starts from another run's parameters with its own optimizer, and resumes by itself."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from quick_study import at_home, config_of, trained

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.train.program import set_up
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.thorough
CONFIG, FROM = "configs/quick.yaml", "init_from.path"
SETTINGS = ("steps=4", "checkpoint.every=2", "evaluate.every=2", "checkpoint.best=highest loss")


@pytest.fixture(name="first")
def _first(run_of, tmp_path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> RunResult:
    """Work beside a run whose best step (by the highest loss) is not its newest."""
    home, outcome, _ = run_of(*SETTINGS, "name=first")
    shutil.copytree(home, tmp_path / "home")
    at_home(tmp_path / "home", monkeypatch, compiled)
    return outcome


def params_of(outcome: RunResult, step: int):
    config = config_of(outcome.directory.config)
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        return checkpoints.restore(step, set_up(config).resolved.abstract_state).params


def same(got, want) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(bool((np.asarray(a) == np.asarray(b)).all()) for a, b in pairs)


WAYS = {"a run by its name": ("first", 4), "a checkpoint": ("runs/first/checkpoints/2", 2)}


@pytest.mark.parametrize("way", WAYS)
def test_starts_from(way, first):
    path, step = WAYS[way]
    state = set_up(config_of(CONFIG, [f"{FROM}={path}", "seed=5"])).initial_state()
    assert same(state.params, params_of(first, step))
    assert (int(state.step), int(state.skipped)) == (0, 0)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert moments
    assert not any(leaf.any() for leaf in moments)


def test_starts_from_the_best_checkpoint_of_a_run(first):
    assert first.results[2]["loss"] > first.results[4]["loss"]
    state = set_up(config_of(CONFIG, [f"{FROM}=first", "init_from.step=best"])).initial_state()
    assert same(state.params, params_of(first, 2))


def test_a_run_says_what_it_took_and_goes_on_without_its_origin(first):
    shutil.copytree(first.directory.path, "runs/origin")
    settings = (f"{FROM}=origin", "init_from.exclude=[down]", "name=second", "steps=6")

    class Enough(jt.Hook):
        every = 3

        def on_state(self, step, state):
            return jt.Stop("enough", "interrupted") if step == 3 else None

    stopped = trained(CONFIG, *settings, hooks=[Enough()])
    assert (stopped.status, stopped.step) == ("stopped", 3)
    log = stopped.directory.log.read_text()
    assert "starts from runs/origin/checkpoints/4: 2 leaves loaded (24 numbers), 1 left" in log
    assert "loaded      up" in log
    assert "left alone  down" in log
    shutil.rmtree("runs/origin")
    done = trained(CONFIG, *settings)
    assert (done.status, done.step) == ("done", 6)
    assert done.directory.log.read_text().count("starts from") == 1
