"""A run starts from another run's parameters with its own optimizer, and resumes by itself."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from quick_study import at_home, config_of, trained, write_study
from safetensors.numpy import save_file

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.cli import main
from jtrain.core.pytree import named_leaves
from jtrain.errors import CheckpointError
from jtrain.train.run_result import RunResult
from jtrain.train.setup import set_up

pytestmark = pytest.mark.thorough

CONFIG, FROM = "configs/quick.yaml", "init_from.path"
SETTINGS = ("steps=4", "checkpoint.every=2", "evaluate.every=2", "checkpoint.best=highest loss")


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module", name="first")
def _first(place: Path) -> RunResult:
    """Train a run whose best step (by the highest loss) is not its newest."""
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, place / "compiled")
        return trained(write_study(place), *SETTINGS, "name=first")


@pytest.fixture(autouse=True)
def _home(place: Path, first: RunResult, monkeypatch: pytest.MonkeyPatch):
    at_home(place, monkeypatch, place / "compiled")


def params_of(outcome: RunResult, step: int):
    config = config_of(outcome.directory.config)
    with CheckpointManager(outcome.directory.checkpoints) as checkpoints:
        return checkpoints.restore(step, set_up(config).like).params


def same(got, want) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(bool((np.asarray(a) == np.asarray(b)).all()) for a, b in pairs)


WAYS = {
    "a run by its name": ("first", 4),
    "a run by its directory": ("runs/first/", 4),
    "its checkpoints": ("runs/first/checkpoints", 4),
    "a checkpoint": ("runs/first/checkpoints/2", 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_starts_from(way, first):
    path, step = WAYS[way]
    state = set_up(config_of(CONFIG, [f"{FROM}={path}", "seed=5"])).fresh()
    assert same(state.params, params_of(first, step))
    assert (int(state.step), int(state.skipped)) == (0, 0)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert moments
    assert not any(leaf.any() for leaf in moments)


def test_starts_from_the_best_checkpoint_of_a_run(first):
    assert first.results[2]["loss"] > first.results[4]["loss"]
    state = set_up(config_of(CONFIG, [f"{FROM}=first", "init_from.step=best"])).fresh()
    assert same(state.params, params_of(first, 2))
    trained(CONFIG, "name=plain", "steps=1", "evaluate.every=0")
    with pytest.raises(CheckpointError, match=r"checkpoint.best=empty.*init_from.step=newest"):
        set_up(config_of(CONFIG, [f"{FROM}=plain", "init_from.step=best"])).fresh()


def test_what_an_optimizer_keeps_of_parameters_is_of_those_that_were_loaded(first):
    kind = "optimizer={kind: schedule_free, lr: 1e-2}"
    state = set_up(config_of(CONFIG, [f"{FROM}=first", kind])).fresh()
    kept = [leaf for name, leaf in named_leaves(state.opt_state).items() if name.endswith("z/up")]
    assert kept
    assert same(kept, [params_of(first, 4)["up"]])


def test_is_split_as_the_strategy_splits_it(first):
    split = ["parallel={kind: fsdp, devices: 2, min_size: 0}"]
    state = set_up(config_of(CONFIG, [*split, f"{FROM}=first"])).fresh()
    alone = set_up(config_of(CONFIG, split)).fresh()
    assert same(state.params, params_of(first, 4))
    shardings = lambda state: [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert shardings(state) == shardings(alone)
    assert not state.params["up"].is_fully_replicated


def test_a_run_says_what_it_took_and_goes_on_without_its_origin(first):
    shutil.copytree(first.directory.path, "runs/origin")
    settings = (f"{FROM}=origin", "init_from.exclude=[down]", "name=second", "steps=6")

    class Enough(jt.Hook):
        every = 3

        def on_state(self, step, state, metrics):
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


def test_a_file_of_tensors_is_one_more_place(first):
    params = params_of(first, 4)
    arrays = {f"net.{name}": np.asarray(leaf) for name, leaf in params.items()}
    save_file(arrays, "weights.safetensors")
    settings = [f"{FROM}=weights.safetensors", 'init_from.rename=[["net/*", "*"]]']
    assert same(set_up(config_of(CONFIG, settings)).fresh().params, params)


def refused(capfd, *settings: str) -> str:
    assert main(["run", CONFIG, *settings, "name=refused"]) == 2
    assert not Path("runs/refused/config.yaml").exists()
    return capfd.readouterr().err


def test_what_is_wrong_is_told_before_anything_is_trained(capfd):
    told = refused(capfd, f"{FROM}=frist")
    assert "init_from.path=frist is no run with a checkpoint" in told
    assert "did you mean first?" in told
    told = refused(capfd, f"{FROM}=first", "model.width=9")
    assert "should give 3 leaves, and 3 do not fit the source runs/first/checkpoints/4" in told
    assert "float32[2, 9]" in told
    assert "float32[2, 8]" in told
    assert "'dwn', which matches none of the 3 leaves of this model. Nearest: down" in refused(
        capfd, f"{FROM}=first", "init_from.exclude=[dwn]"
    )
    assert "as many * in both names" in refused(
        capfd, f"{FROM}=first", 'init_from.rename=[["a/*", "b"]]'
    )
