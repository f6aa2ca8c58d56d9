"""`jt.fit` takes the same steps as a run, and leaves its arguments unchanged."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

import jtrain as jt
from experiments.mnist1d import FullBatches
from jtrain.config.resolve import resolve
from jtrain.data import Arrays, InOrder, Shuffled
from jtrain.errors import ConfigError, DataError, LossError
from jtrain.train import fit_arguments, fit_data

pytestmark = pytest.mark.usefixtures("here")
X = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
Y = (X @ np.float32([1, 2, 3])).astype(np.float32)


def loss(params, batch, rng):
    del rng
    return jt.Mean.of(jnp.square(batch["x"] @ params["w"] - batch["y"]), batch["mask"])


def zeros():
    return {"w": np.zeros(3, np.float32)}


def test_takes_the_steps_of_a_loop_by_hand():
    given = zeros()
    result = jt.fit(
        loss, given, (X, Y), "sgd", lr=0.1, steps=12, batch=16, every=1, seed=3, quiet=True
    )
    assert np.array_equal(given["w"], np.zeros(3)), "the given parameters stay"
    assert not list(Path().iterdir()), "nothing was written"
    batches, optimizer = Shuffled(Arrays(x=X, y=Y), size=16, seed=3), optax.sgd(0.1)
    state = jt.new_state(jax.tree.map(jnp.asarray, zeros()), optimizer, jax.random.key(0))
    step, losses = jax.jit(jt.make_step(loss, optimizer)), {}
    for number in range(1, 13):
        state, metrics = step(state, batches[number - 1])
        losses[number] = metrics["loss"].value()
    assert result.history["loss"] == pytest.approx(losses, rel=1e-5)
    assert_close(result.params["w"], state.params["w"], 1e-5)
    assert (result.step, int(result.state.step), result.why, result.directory) == (12, 12, "", None)


def hills(params, batch, rng):
    """Compute a loss that pulls towards 10 in training; the validation rows' 5 is on the way."""
    del rng
    return jt.Mean.of(jnp.square(params["w"] - batch["x"]), batch["mask"])


@pytest.mark.thorough
def test_gives_back_the_best_and_stops_when_it_gets_worse(capfd):
    ten, five = np.full(16, 10, np.float32), {"x": np.full(7, 5, np.float32)}
    told = []

    def look(step, results):
        told.append((step, results.get("near/loss", "far")))

    sets, hooks = {"near": five, "far": ten[:3]}, [jt.EarlyStop(patience=2), look]
    how = {"lr": 0.02, "steps": 90, "batch": 8, "valid_every": 5, "best": "loss"}
    result = jt.fit(hills, {"w": np.float32(0)}, ten, "sgd", valid=sets, hooks=hooks, **how)
    near = result.history["near/loss"]
    step = min(near, key=lambda s: near[s])
    assert result.best == (step, {"loss": near[step], "rows": 7})
    assert (result.step, result.why) == (
        step + 10,
        f"near/loss was no better in 2 evaluations than at step {step}",
    )
    again = jt.evaluate(hills, result.params, five)
    assert again == pytest.approx({"loss": near[step], "rows": 7}, rel=1e-6)
    assert float(result.state.params["w"]) > float(result.params["w"]), "the last is further on"
    assert told[0] == (5, near[5])
    assert told[1] == (5, "far")
    said = capfd.readouterr().out
    assert "fit: 1 parameters" in said
    assert f"ended after step {step + 10}" in said


def test_gives_back_the_last_state_if_that_is_the_best():
    ten = np.full(16, 10, np.float32)
    how = {"lr": 0.02, "steps": 5, "batch": 8, "valid": ten, "valid_every": 2, "best": "loss"}
    result = jt.fit(hills, {"w": np.float32(0)}, ten, "sgd", **how, quiet=True)
    assert result.best is not None
    assert result.best.step == 5, "no evaluation is due there, but at the end"
    assert result.params["w"] == result.state.params["w"]


@pytest.mark.thorough
def test_goes_on_where_a_named_call_was_stopped():
    call = dict(lr=0.01, steps=12, batch=16, every=1, valid=(X, Y), valid_every=4, quiet=True)
    whole = jt.fit(loss, zeros(), (X, Y), **call)
    half = lambda step, state: jt.Stop("enough") if step == 6 else None
    first = jt.fit(loss, zeros(), (X, Y), **call, name="mine", hooks=[half])
    assert (first.step, first.why, first.directory) == (6, "enough", Path("runs/mine"))
    for _ in range(2):  # goes on, and then knows that it is done
        second = jt.fit(loss, zeros(), (X, Y), **call, name="mine")
        assert second.step == 12
        assert np.array_equal(second.params["w"], whole.params["w"])
        assert second.history == whole.history
    with pytest.raises(ConfigError, match=r"batch: 16 there, 8 here\nStart a new run: name=m"):
        jt.fit(loss, zeros(), (X, Y), **(call | {"batch": 8}), name="mine")


def test_data_comes_in_many_forms_and_is_the_same():
    rows = Shuffled(Arrays(x=X, y=Y), size=32, seed=1)
    for data in ({"x": X, "y": Y}, (X, Y), Arrays(x=X, y=Y), rows):
        got = fit_data.build_train_batches(data, None, seed=1)[3]
        assert got.keys() == rows[3].keys()
        assert all(np.array_equal(got[name], rows[3][name]) for name in got)
    assert fit_data.build_train_batches(X, 10, seed=0)[0].keys() == {"x", "row", "mask"}
    assert len(fit_data.build_batches(InOrder(Arrays(x=X), size=7), 3)) == 8, "its own size stays"
    assert list(fit_data.build_evaluation_sets({"a": (X, Y), "b": {"x": X}}, 5)) == ["a", "b"]
    assert fit_data.build_evaluation_sets({"x": X, "y": Y}, 5).size == 5


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"guard": "rollback"}, ConfigError, 'saves none. Give the run a name, name="mine"'),
        ({"params": {"w": np.zeros(3, int)}}, DataError, "parameter w holds int64"),
        ({"hooks": [jt.EarlyStop()]}, ConfigError, r"there is none; .*: valid=\.\.\."),
    ],
)
def test_reports_values_that_do_not_fit(changes, error, words):
    call = {"params": zeros(), "data": (X, Y), "steps": 10, "batch": 16, "quiet": True} | changes
    with pytest.raises(error, match=words):
        jt.fit(loss, **call)


@pytest.mark.thorough
def test_does_not_end_as_if_nothing_were_wrong_when_no_step_is_finite():
    bad = np.where(np.arange(50) == 7, np.nan, Y).astype(np.float32)
    data = FullBatches(Arrays(x=X[:48], y=bad[:48]))
    with pytest.raises(LossError, match=r"was finite: loss nan.*row 7 of `y` has nan"):
        jt.fit(loss, zeros(), data, steps=4, every=2, quiet=True)


@pytest.mark.thorough
def test_bad_steps_are_dealt_with_as_asked(tmp_path):
    rows = {"x": X[:48], "y": np.where(np.arange(48) == 7, np.nan, Y[:48]).astype(np.float32)}
    call = {"steps": 3, "batch": 16, "every": 3, "quiet": True}  # each row once
    skipped = jt.fit(loss, zeros(), rows, **call)
    assert (skipped.step, int(skipped.state.skipped)) == (3, 1)
    with pytest.raises(LossError, match="row 5 of `y` has nan"):
        jt.fit(loss, zeros(), rows, **call, guard="stop")
    back = jt.fit(loss, zeros(), rows, **call, guard="rollback", directory=tmp_path / "back")
    assert (back.step, int(back.state.skipped)) == (3, 0)
    assert np.isfinite(list(back.history["loss"].values())).all()


@pytest.mark.thorough
def test_the_history_always_has_the_last_step():
    call = {"steps": 21, "batch": 16, "every": 10, "quiet": True, "steps_per_call": 7}
    whole = jt.fit(loss, zeros(), (X, Y), **call, valid_every=21, checkpoint_every=21)
    assert list(whole.history["loss"]) == [10, 20, 21]
    each = jt.fit(loss, zeros(), (X, Y), **(call | {"every": 1}))
    assert whole.history["loss"][21] == each.history["loss"][21]
    assert whole.history.keys() == each.history.keys()


@pytest.mark.thorough
def test_numbers_of_numpy_and_jax_are_taken_as_pythons():
    loss = lambda p, batch, rng: jt.Mean.of((batch["x"] @ p["w"]) ** 2, batch["mask"])
    w = {"w": np.ones(3, np.float32)}
    numbers = [np.asarray, jnp.asarray, lambda x: np.array([x])[0]]
    given = {"batch": 8, "seed": 3, "steps": 2, "every": 1, "lr": 0.25, "valid": 0.5, "devices": 1}
    other = {name: numbers[i % 3](x) for i, (name, x) in enumerate(given.items())}
    one, two = (jt.fit(loss, w, X, "sgd", quiet=True, **each) for each in (given, other))
    np.testing.assert_array_equal(one.params["w"], two.params["w"])
    assert one.history == two.history
    for number in numbers:
        assert fit_arguments.build_strategy("mirrored", [number(0)]).devices == (0,)
        one, two = (Shuffled(Arrays(x=X), size=n, seed=n)[0]["x"] for n in (8, number(8)))
        np.testing.assert_array_equal(one, two)
        assert len(InOrder(Arrays(x=X), size=number(20))) == 3
    assert fit_arguments.build_strategy("mirrored", np.arange(2)).devices == (0, 1)


SCRIPT = '''
import jax
import numpy as np
from flax import nnx

import jtrain as jt

x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
data = x, x[:, :3].argmax(1)
more = {"metrics": ["f1_macro"], "class_weight": {0: 2.0}}


def make_net():
    rngs = nnx.Rngs(0)
    norm = nnx.BatchNorm(8, rngs=rngs)
    layers = nnx.Linear(4, 8, rngs=rngs), norm, nnx.Dropout(0.1, rngs=rngs)
    return nnx.Sequential(*layers, nnx.Linear(8, 3, rngs=rngs))


@jt.configclass
class Config(jt.RunConfig):
    """What was a script."""

    def build(self, place):
        net = make_net()
        return jt.Experiment(net=net, loss=jt.classifier(net), train=data, valid=0.2, **more)
'''


def test_net_loss_and_rows_of_a_script_are_an_experiment_as_they_are():
    Path("experiments").mkdir()
    Path("experiments/script.py").write_text(SCRIPT)
    values = {"steps": 12, "batch": 16, "seed": 3, "checkpoint": {"every": 0}}
    given = {"experiment": "script", "optimizer": {"kind": "adam", "lr": 0.01}, **values}
    Path("script.yaml").write_text(json.dumps(given))
    outcome = jt.run(resolve("script.yaml").config)
    script = sys.modules["experiments.script"]
    net = script.make_net()
    classifier = jt.classifier(net)
    result = jt.fit(
        *(classifier, net, script.data, "adam"), valid=0.2, lr=0.01, steps=12, batch=16, seed=3,
        quiet=True, **script.more,
    )  # fmt: skip
    last = outcome.results[12]
    assert last == {name: result.history[f"valid/{name}"][12] for name in last}
    run = jt.load(outcome.directory.path)
    assert run.predict(script.x).tolist() == result.predict(script.x).tolist()
    assert run.inputs.keys() == {"x"}
