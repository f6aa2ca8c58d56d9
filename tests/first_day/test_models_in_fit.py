"""An nnx module, a Model or a function handed to fit: the same steps as a loss written by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, assert_leaves_close
from flax import nnx

import jtrain as jt
from jtrain.errors import LossError
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.adapters.nnx import from_nnx

pytestmark = pytest.mark.thorough

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(48, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0)
HOW = {"steps": 4, "batch": 16, "parallel": "single", "quiet": True, "every": 1}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, drop: float = 0.0, norm: bool = False):
        self.inner = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(drop, rngs=rngs)
        self.outer = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.inner(x)
        x = x if self.norm is None else self.norm(x)
        return self.outer(self.dropout(nnx.relu(x)))


def plain(params, batch, rng):
    """Apply the same network without dropout, written by hand."""
    hidden = jax.nn.relu(batch["x"] @ params["inner"]["kernel"] + params["inner"]["bias"][None])
    logits = hidden @ params["outer"]["kernel"] + params["outer"]["bias"][None]
    return cross_entropy(logits, batch["y"], batch["mask"])


def of_module(net, batch, rng):
    del rng
    return jt.Mean.of(
        optax.softmax_cross_entropy_with_integer_labels(net(batch["x"]), batch["y"]), batch["mask"]
    )


@pytest.fixture(scope="module", name="by_hand")
def _by_hand():
    params, _ = from_nnx(Net(nnx.Rngs(0))).init(jax.random.key(0))
    return jt.fit(plain, params, (X, Y), "sgd", lr=0.1, **HOW)


@pytest.mark.parametrize("way", ["classifier", "own loss", "Model", "function"])
def test_takes_the_steps_of_a_loss_by_hand(way, by_hand):
    net = Net(nnx.Rngs(0))
    model = from_nnx(Net(nnx.Rngs(0)))
    apply = lambda params, x: model.apply(params, {}, x)[0]
    loss, params = {
        "classifier": (jt.classifier(net), net),
        "own loss": (of_module, net),
        "Model": (jt.classifier(model), model),
        "function": (jt.classifier(apply), model.init(jax.random.key(0))[0]),
    }[way]
    result = jt.fit(loss, params, (X, Y), "sgd", lr=0.1, **HOW)
    # The loss by hand sums in float64 what optax and ours sum in float32: a few roundings a step.
    assert result.history["loss"] == pytest.approx(by_hand.history["loss"], rel=1e-5)
    assert_leaves_close(result.params, by_hand.params, 1e-4)


def test_a_module_stays_as_it_was_and_a_trained_one_comes_back():
    net = Net(nnx.Rngs(0), drop=0.5, norm=True)
    before = np.array(net.inner.kernel[...])
    result = jt.fit(jt.classifier(net), net, (X, Y), lr=1e-2, valid=(X, Y), **HOW)
    np.testing.assert_array_equal(net.inner.kernel[...], before)
    trained = result.model
    assert (np.asarray(trained.inner.kernel[...]) != before).any()
    assert np.asarray(trained.norm.mean[...]).any(), "the running statistics moved"
    logits = trained(jnp.asarray(X))
    assert_close(result.predict(X), logits, 1e-5)
    found = result.evaluate((X, Y))
    assert found["rows"] == 48
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == Y).mean()))
    last = {name: steps[4] for name, steps in result.history.items() if name.startswith("valid/")}
    assert found["loss"] == pytest.approx(last["valid/loss"], rel=1e-6)
    again = jt.evaluate(jt.classifier(trained), trained, (X, Y))
    assert again == pytest.approx(found, rel=1e-5)
    by_module = jt.predict(lambda net, batch: net(batch["x"]), trained, X)
    assert_close(by_module, result.predict(X), 1e-5)


def test_a_batch_norm_says_that_rows_meet():
    net = Net(nnx.Rngs(0), norm=True)
    assert jt.classifier(net).rows_interact == "batch"
    assert jt.classifier(Net(nnx.Rngs(0), drop=0.5)).rows_interact == "never"
    for loss in (jt.classifier(net), of_module):
        with pytest.raises(LossError, match="2 microbatches would cut the batch"):
            jt.fit(loss, net, (X, Y), microbatches=2, **HOW)
        jt.fit(loss, net, (X, Y), microbatches=2, rows_interact="slice", **HOW)


def test_regression_is_the_mean_squared_error_in_either_shape():
    net = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    target = X.sum(1)
    found = [
        jt.evaluate(jt.regression(net), net, data)
        for data in ((X, target), (X, target[:, None]), (X, target.astype(np.float64)))
    ]
    want = np.square(np.asarray(net(jnp.asarray(X)))[:, 0] - target).mean()
    assert [one["loss"] for one in found] == pytest.approx([want] * 3, rel=1e-5)
    assert found[0]["absolute_error"] > 0


def test_a_binary_classifier_takes_0_and_1():
    net = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    truth = (X[:, 0] > 0).astype(np.int32)
    result = jt.fit(jt.binary_classifier(net), net, (X, truth), "sgd", lr=1.0, **HOW)
    logits = result.predict(X)[:, 0]
    want = optax.sigmoid_binary_cross_entropy(logits, truth).mean()
    assert result.evaluate((X, truth))["loss"] == pytest.approx(float(want), rel=1e-5)
    assert result.evaluate((X, truth))["accuracy"] == pytest.approx(((logits > 0) == truth).mean())


def test_a_classifier_takes_soft_labels_columns_and_pixels():
    net = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    hard = jt.evaluate(jt.classifier(net), net, (X, Y))
    soft = jt.evaluate(jt.classifier(net), net, (X, np.eye(3, dtype=np.float32)[Y]))
    column = jt.evaluate(jt.classifier(net), net, (X, Y[:, None]))
    assert soft == pytest.approx(hard, rel=1e-5)
    assert column == pytest.approx(hard, rel=1e-6)
    pixels = jt.evaluate(jt.classifier(net), net, (np.stack([X, X], 1), np.stack([Y, Y], 1)))
    assert pixels["loss"] == pytest.approx(hard["loss"], rel=1e-5)
    smooth = jt.evaluate(jt.classifier(net, smoothing=0.1), net, (X, Y))
    assert smooth["loss"] != pytest.approx(hard["loss"], rel=1e-3)
    named = {"image": X, "label": Y}
    assert jt.evaluate(
        jt.classifier(net, inputs="image", labels="label"), net, named
    ) == pytest.approx(hard)


class Sums(nnx.Module):
    """Language model whose logits depend on all earlier tokens of the segment."""

    def __init__(self):
        self.embed = nnx.Param(jnp.eye(5) + 0.1 * jnp.arange(25.0).reshape(5, 5))

    def __call__(self, tokens, segments=None):
        segments = jnp.ones_like(tokens) if segments is None else segments
        return sums_by_segment(self.embed[...][tokens], segments)


def sums_by_segment(values, segments):
    sees = jnp.tril(segments[:, :, None] == segments[:, None])
    return jnp.einsum("bts,bsv->btv", sees.astype(jnp.float32), values)


def test_a_model_of_your_own_gets_the_segments_of_packed_rows_and_must_take_them():
    tokens = DRAW.integers(0, 5, (4, 8)).astype(np.int32)
    segments = np.repeat([[1, 1, 1, 1, 2, 2, 2, 2]], 4, 0).astype(np.int32)
    packed, alone = {"tokens": tokens, "segments": segments}, {"tokens": tokens.reshape(8, 4)}
    sums = lambda params, tokens, segments: sums_by_segment(params["embed"][tokens], segments)
    params, plain = {"embed": Sums().embed[...]}, jt.language_model(Sums())
    want, outputs = jt.evaluate(plain, params, alone), jt.predict(plain, params, alone)
    for loss in (plain, jt.language_model(sums)):
        found = jt.evaluate(loss, params, packed)
        assert found == pytest.approx({**want, "rows": 4}, rel=1e-5)
        predicted = jt.predict(loss, params, packed)
        assert_close(predicted.reshape(outputs.shape), outputs, 1e-5, terms=np.abs(outputs).max())
    blind = jt.language_model(lambda params, tokens: params["embed"][tokens])
    with pytest.raises(LossError, match=r"packed, .* takes only their tokens.*tokens, segments\)"):
        jt.evaluate(blind, params, packed)


@dataclasses.dataclass
class Target:
    """A loss with arrays of its own."""

    value: np.ndarray

    def __call__(self, params, batch, rng):
        del rng
        return jt.Mean.of((params["w"] - self.value) ** 2 * batch["x"][:, 0], batch["mask"])


def test_a_loss_without_a_hash_trains():
    loss = Target(np.float32(3))
    with pytest.raises(TypeError, match="unhashable"):
        hash(loss)
    start, data = {"w": jnp.zeros(())}, {"x": np.ones((8, 1), np.float32)}
    result = jt.fit(loss, start, data, "sgd", lr=0.25, steps=2, batch=8, quiet=True)
    assert float(result.params["w"]) == 3 * (1 - 0.5**2)
