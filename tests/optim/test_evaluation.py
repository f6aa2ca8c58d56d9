"""Evaluation parameters that are not the trained ones: on every layout, in every place."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from comparison import assert_close, distance
from quick_study import CODE, at_home, config_of, trained, write_study

from jtrain.checkpoint import CheckpointManager
from jtrain.cli import main
from jtrain.core.loop import Hook
from jtrain.core.pytree import named_leaves
from jtrain.core.state import new_state
from jtrain.optim import SGD, ParamGroup, ScheduleFree
from jtrain.train.program import Program, set_up
from jtrain.train.run_result import RunResult

pytestmark = pytest.mark.thorough

SAMPLED = CODE.replace(
    "optimizer=self.optimizer.build(self.steps),",
    "optimizer=self.optimizer.build(self.steps),\n"
    '            sample=lambda params, extra, key: str(float(params["up"].sum())),',
)
SETTINGS = ("checkpoint.every=2", "evaluate.every=2", "checkpoint.best=loss", "checkpoint.keep=9")
KINDS = {
    "averaged": ("optimizer.ema=0.7",),
    "schedule_free": ("optimizer={kind: schedule_free, lr: 3e-2}",),
}
LAYOUTS = [
    ("parallel={kind: mirrored, devices: 4, impl: shard_map}", "evaluate.batch=12"),
    ("parallel={kind: mirrored, devices: 2, impl: pmap}", "evaluate.batch=6"),
    ("parallel={kind: fsdp, devices: 8, min_size: 0}", "evaluate.batch=64"),
]


class Walked(Hook):
    """Keeps the parameters after every step."""

    def __init__(self):
        self.params = []

    def on_state(self, step, state):
        self.params.append(jax.tree.map(np.array, state.params))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("judged")
    write_study(place, SAMPLED)
    return place


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[str, tuple[RunResult, list]]:
    """Return the final state of each kind, and the parameters after each step."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, place / "compiled")
        for kind, values in KINDS.items():
            walked = Walked()
            settings = (*values, *SETTINGS, f"name={kind}")
            found[kind] = trained("configs/quick.yaml", *settings, hooks=[walked]), walked.params
    return found


@pytest.fixture(autouse=True)
def _home(place: Path, runs, monkeypatch: pytest.MonkeyPatch):
    at_home(place, monkeypatch, place / "compiled")


def mean(kind: str, walked: list) -> dict[str, np.ndarray]:
    """Compute the evaluation parameters from those after each step, in float64."""
    walked = [jax.tree.map(np.float64, params) for params in walked]
    if kind == "averaged":
        weights = 0.7 ** np.arange(len(walked))[::-1]
        share = weights / weights.sum()
        return jax.tree.map(lambda *p: sum(w * x for w, x in zip(share, p, strict=True)), *walked)
    # At a constant rate: y = 0.9 x + 0.1 z and x' = x + (z' - x) / t, so that z' is got from y'.
    x = walked[0]
    for t, y in enumerate(walked[1:], 2):
        x = jax.tree.map(lambda x, y, t=t: _after(x, y, t), x, y)
    return x


def _after(x, y, t):
    z = (y - 0.9 * x * (1 - 1 / t)) / (0.9 / t + 0.1)
    return x + (z - x) / t


def plain(parts: Program, params) -> dict[str, float]:
    """Return the metrics of these parameters."""
    bare = config_of("configs/quick.yaml", ("optimizer={kind: sgd, lr: 1}",))
    there = set_up(bare)
    params = jax.tree.map(np.float32, params)
    return there.measure(new_state(params, optax.identity(), jax.random.key(0)))


def restored(kind: str, *settings: str):
    outcome_config = Path("runs") / kind / "config.yaml"
    parts = set_up(config_of(outcome_config, settings))
    with CheckpointManager(Path("runs") / kind / "checkpoints") as checkpoints:
        return parts, checkpoints.restore(12, parts.resolved.abstract_state)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*(("averaged", layout) for layout in LAYOUTS), ("schedule_free", LAYOUTS[-1])],
    ids=str,
)
def test_every_layout_measures_the_mean(kind: str, layout, runs):
    outcome, walked = runs[kind]
    parts, state = restored(kind, *layout)
    params = parts.evaluation_params(state)
    for name, found in named_leaves(params).items():
        wanted = named_leaves(mean(kind, walked))[name]
        assert_close(found, wanted, 2e-6)
        # As the trained ones lie: gathered nowhere.
        assert found.sharding == named_leaves(state.params)[name].sharding
        assert np.abs(found - named_leaves(walked[-1])[name]).max() > 1e-3, "nothing to tell apart"
    assert parts.measure(state) == pytest.approx(outcome.results[12], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_evaluates_samples_and_picks_by_the_mean(kind: str, runs, capfd):
    outcome, walked = runs[kind]
    parts, _ = restored(kind)
    for step in (2, 12):
        numbers = plain(parts, mean(kind, walked[:step]))
        assert outcome.results[step] == pytest.approx(numbers, rel=2e-5)
        of_trained = plain(parts, walked[step - 1])["loss"]
        assert of_trained != pytest.approx(numbers["loss"], rel=1e-4)
    up = mean(kind, walked)["up"]
    assert_close(float(outcome.sample), up.sum(), 1e-5, terms=np.abs(up).sum())
    best = min(outcome.results, key=lambda step: outcome.results[step]["loss"])
    assert main(["eval", kind, "--step", "best", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["step"], told["valid"]) == (best, dict(outcome.results[best]))


@pytest.mark.parametrize("values", [SGD(lr=0.1, ema=0.5), ScheduleFree(lr=0.1)])
def test_frozen_leaves_are_judged_as_they_are_and_keep_no_average(values):
    params = {"a": np.float32([1, 2]), "b": np.float32([3, 4])}
    frozen = type(values)(lr=0.1, ema=values.ema, groups=(ParamGroup(match="b", freeze=True),))
    optimizer = frozen.build(3)
    state = optimizer.init(params)
    _, state = optimizer.update(jax.tree.map(np.ones_like, params), state, params)
    found = optimizer.eval_params(state, params)
    np.testing.assert_array_equal(found["b"], params["b"])
    assert distance(found["a"], params["a"]) > 1e-3
    assert not [name for name in named_leaves(state) if name.endswith("/b")]


def test_the_average_of_narrow_parameters_is_kept_wide():
    params = {"w": jax.numpy.bfloat16([1.0])}
    optimizer = SGD(lr=2.0**-7, ema=0.999).build(600)
    state, walked = optimizer.init(params), []
    step = jax.jit(optimizer.update)
    for _ in range(100):
        updates, state = step({"w": jax.numpy.bfloat16([1.0])}, state, params)
        params = optax.apply_updates(params, updates)
        walked.append(float(params["w"][0]))
    weights = 0.999 ** np.arange(100)[::-1]
    found = optimizer.eval_params(state, params)["w"]
    assert found.dtype == jax.numpy.bfloat16
    wanted = np.dot(weights, walked) / weights.sum()
    assert state[-1][-1].average["w"][0] == pytest.approx(wanted, rel=1e-5)
    assert float(found[0]) == pytest.approx(wanted, rel=4e-3)
