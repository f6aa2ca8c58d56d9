"""A run starts from another run's parameters with its own optimizer, and resumes by itself."""

import shutil

import jax
import pytest
from comparison import bitwise
from quick_study import At, config_of, state_of, trained

import jtrain as jt
from jtrain.train.program import set_up
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.thorough
CONFIG, FROM = "configs/quick.yaml", "init_from.path"
SETTINGS = ("steps=4", "checkpoint.every=2", "evaluate.every=2", "checkpoint.best=highest loss")


@pytest.fixture(name="first")
def _first(copy_of) -> RunResult:
    """Work beside a run whose best step (by the highest loss) is not its newest."""
    return copy_of(*SETTINGS, "name=first")


def params_of(outcome: RunResult, step: int):
    return state_of(outcome.directory, step).params


WAYS = {"a run by its name": ("first", 4), "a checkpoint": ("runs/first/checkpoints/2", 2)}


@pytest.mark.parametrize("way", WAYS)
def test_starts_from(way, first):
    path, step = WAYS[way]
    state = set_up(config_of(CONFIG, [f"{FROM}={path}", "seed=5"])).initial_state()
    assert bitwise(state.params, params_of(first, step))
    assert (int(state.step), int(state.skipped)) == (0, 0)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert moments
    assert not any(leaf.any() for leaf in moments)


def test_starts_from_the_best_checkpoint_of_a_run(first):
    assert first.results[2]["loss"] > first.results[4]["loss"]
    state = set_up(config_of(CONFIG, [f"{FROM}=first", "init_from.step=best"])).initial_state()
    assert bitwise(state.params, params_of(first, 2))


def test_a_run_says_what_it_took_and_goes_on_without_its_origin(first):
    shutil.copytree(first.directory.path, "runs/origin")
    settings = (f"{FROM}=origin", "init_from.exclude=[down]", "name=second", "steps=6")

    stopped = trained(CONFIG, *settings, hooks=[At(3, lambda: jt.Stop("enough"))])
    assert (stopped.status, stopped.step) == ("stopped", 3)
    log = stopped.directory.log.read_text()
    assert "starts from runs/origin/checkpoints/4: 2 leaves loaded (24 numbers), 1 left" in log
    assert "loaded      up" in log
    assert "left alone  down" in log
    shutil.rmtree("runs/origin")
    done = trained(CONFIG, *settings)
    assert (done.status, done.step) == ("done", 6)
    assert done.directory.log.read_text().count("starts from") == 1
