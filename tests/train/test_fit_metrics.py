"""Metrics of `jt.fit` and `jt.evaluate`: those of all rows, in any split; weights by class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import by_name
from comparison import assert_close

import jtrain as jt
from jtrain.checkpoint.retention import BestMetric
from jtrain.errors import ConfigError, LossError
from jtrain.models import Transformer
from jtrain.parallel import FSDP, Mirrored

pytestmark = pytest.mark.usefixtures("here")
DRAW = np.random.default_rng(0)
ROWS = 45  # the last batch of 16 has 13
X = DRAW.normal(size=(ROWS, 4)).astype(np.float32)
W = {"w": DRAW.normal(size=(4, 3)).astype(np.float32)}
WEIGHT = DRAW.integers(0, 3, ROWS).astype(np.float32)
WEIGHT[0] = 1  # the check of hidden rows repeats the first
CLASSES = DRAW.integers(0, 3, ROWS).astype(np.int32)
NUMBERS = (2000 + DRAW.normal(size=(ROWS, 3))).astype(np.float32)
TOKENS = DRAW.integers(0, 3, (ROWS, 6)).astype(np.int32)
LENGTHS = DRAW.integers(1, 6, ROWS).astype(np.int32)
TEXT = Transformer(vocab=3, context=5, layers=1, heads=1, width=8).build()


def three(params, x):
    return x @ params["w"]


def one(params, x):
    return (x @ params["w"])[:, 0]


def far(params, x):
    return 2000 + 0.1 * (x @ params["w"])


def of_tokens(params, tokens):
    return params["w"][tokens]


def missed(outputs, targets, mask, weights):
    return jt.Mean.of((outputs.argmax(-1) != targets).astype(jnp.float32), mask, weights)


# A loss, its data, its parameters, and its metrics.
MANY = ["accuracy", "top_2", "confusion", "f1_macro", "f1_micro", "perplexity", missed]
LOSSES = {
    "classes": (jt.classifier(three), {"x": X, "y": CLASSES, "weight": WEIGHT}, W, MANY),
    "binary": (
        jt.binary_classifier(one),
        {"x": X, "y": (CLASSES > 0).astype(np.float32), "weight": WEIGHT},
        W,
        [*MANY, "auc", "f1"],
    ),
    "numbers": (jt.regression(far), {"x": X, "y": NUMBERS, "weight": WEIGHT}, W, ["r2"]),
    "tokens": (
        jt.language_model(of_tokens),
        {"tokens": TOKENS, "length": LENGTHS, "weight": WEIGHT},
        {"w": W["w"][:3]},
        MANY,
    ),
    "text": (
        jt.language_model(TEXT),
        {"tokens": TOKENS, "length": LENGTHS, "weight": WEIGHT},
        TEXT.init(jax.random.key(0))[0],
        MANY,
    ),
}
LAYOUTS = {
    "one": {"devices": 1, "batch": 16},
    "two": {"devices": 2, "batch": 24},
    "four": {"devices": 4, "batch": 16},
    "shard_map": {"parallel": Mirrored(devices=4, impl="shard_map"), "batch": 16},
    "fsdp": {"parallel": FSDP(devices=2), "batch": 48},
}


def by_hand(name: str) -> dict:
    """Return the metrics by numpy in float64, of each target with its weight."""
    loss, data, params, _ = LOSSES[name]
    weights = data["weight"].astype(np.float64)
    if "tokens" in data:
        inputs = jnp.asarray(TOKENS[:, :-1])
        outputs = (
            of_tokens(params, inputs)
            if name == "tokens"
            else loss.outputs(
                params, {}, {"tokens": inputs, "mask": jnp.ones(ROWS, bool), "row": np.arange(ROWS)}
            )
        )
        y, real = TOKENS[:, 1:], np.arange(5)[None] < LENGTHS[:, None]
        outputs, y = np.asarray(outputs, np.float64)[real], y[real]
        weights = np.broadcast_to(weights[:, None], real.shape)[real]
    else:
        outputs = np.asarray(loss.model.apply(params, {}, X, rng=None)[0], np.float64)
        y = data["y"].astype(np.float64)
    if name == "numbers":
        mean = (weights[:, None] * y).sum(0) / weights.sum()
        spread = (weights[:, None] * (y - mean) ** 2).sum(0)
        return {"r2": np.mean(1 - (weights[:, None] * (y - outputs) ** 2).sum(0) / spread)}
    logits = np.stack([0 * outputs, outputs], -1) if name == "binary" else outputs
    return of_classes(logits, y.astype(int), weights)


def of_classes(logits, y, weights) -> dict:
    mean = lambda x: (weights * x).sum() / weights.sum()
    likeliest, order = logits.argmax(-1), np.argsort(-logits, -1)
    counts = np.zeros((logits.shape[-1],) * 2)
    np.add.at(counts, (y, likeliest), weights)
    f1 = 2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, y[:, None], -1)[:, 0]
    score = logits[:, 1] - logits[:, 0]
    ahead = np.sign(score[:, None] - score[None])[y == 1][:, y == 0] / 2 + 0.5
    pairs = weights[y == 1][:, None] * weights[y == 0][None]
    return {
        "accuracy": mean(likeliest == y),
        "top_2": mean((order[:, :2] == y[:, None]).any(-1)),
        "confusion": counts,
        "f1_macro": f1.mean(),
        "f1_micro": mean(likeliest == y),
        "perplexity": np.exp(mean(nats)),
        "missed": mean(likeliest != y),
        "auc": (pairs * ahead).sum() / pairs.sum(),
        "f1": f1[1],
    }


@pytest.mark.parametrize("layout", by_name(LAYOUTS, ("four",), pytest.mark.thorough))
@pytest.mark.parametrize("name", by_name([*LOSSES], ("binary", "numbers"), pytest.mark.thorough))
def test_metrics_are_those_of_all_rows_in_any_split(name: str, layout: dict):
    loss, data, params, metrics = LOSSES[name]
    found, want = jt.evaluate(loss, params, data, metrics=metrics, **layout), by_hand(name)
    names = [x if isinstance(x, str) else x.__name__ for x in metrics]
    assert set(names) <= found.keys()
    for each in names:
        assert_close(found[each], want[each], 2e-6, says=each)


def test_scores_of_a_bin_are_ties_and_no_more():
    score = (2 * DRAW.normal(size=10_000)).astype(np.float32)
    y = (DRAW.random(10_000) < 1 / (1 + np.exp(-score))).astype(np.int32)
    classifier = jt.binary_classifier(lambda p, x: x * p)
    area_at = lambda scale: jt.evaluate(
        classifier, np.float32(scale), (score, y), metrics=["auc"], batch=2000
    )["auc"]
    rank = np.argsort(np.argsort(score)) + 1.0
    positive = y.sum()
    area = (rank[y == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(y) - positive))
    assert 0 < abs(area_at(1) - area) < 5e-6
    assert area_at(1000) == pytest.approx(area, abs=1e-2), "however sure the model is"


def test_a_step_has_the_means_and_an_evaluation_all(here):
    call = dict(steps=3, batch=16, every=1, lr=0.1, quiet=True, metrics=["top_2", "confusion"])
    loss, data, params, _ = LOSSES["classes"]
    whole, parts = (
        jt.fit(loss, params, data, valid=data, microbatches=n, devices=2, name=f"n{n}", **call)
        for n in (1, 2)
    )
    assert whole.history["top_2"] == pytest.approx(parts.history["top_2"], rel=1e-6)
    assert {"confusion", "valid/top_2"} & whole.history.keys() == {"valid/top_2"}
    counts = np.asarray(whole.history["valid/confusion"][3])
    assert counts.sum() == WEIGHT.sum()
    assert f"valid/confusion    [[{counts[0, 0]}" in repr(whole)
    assert '"valid/confusion": [[' in (here / "runs/n1/metrics.jsonl").read_text()
    again = whole.evaluate(data, metrics=["confusion", "f1_macro"])
    assert np.array_equal(again["confusion"], counts)
    assert "f1_macro" in again


def own(params, batch, rng):
    logits, y, mask = three(params, batch["x"]), batch["y"], batch["mask"]
    value, metrics = jt.losses.cross_entropy(logits, y, mask)
    return value, metrics | {"f1": jt.metrics.f1_macro(logits, y, mask)}


def test_a_loss_of_ones_own_returns_a_statistic():
    call = dict(steps=8, batch=16, every=1, lr=0.1, quiet=True, devices=2)
    data = {"x": X[:16], "y": CLASSES[:16]}
    one, parts = (jt.fit(own, W, data, microbatches=n, **call).history["f1"] for n in (1, 2))
    assert one == pytest.approx(parts, rel=1e-6)
    want = of_classes((X[:16] @ W["w"]).astype(np.float64), CLASSES[:16], np.ones(16))
    assert one[1] == pytest.approx(want["f1_macro"], rel=1e-6)


def test_the_best_score_is_the_highest(here):
    loss, data, params, metrics = LOSSES["binary"]
    call = dict(steps=6, batch=16, lr=0.5, valid=data, valid_every=2, metrics=["auc"], quiet=True)
    result = jt.fit(loss, params, {**data, "y": 1 - data["y"]}, best="auc", **call)
    area = result.history["valid/auc"]
    assert area[2] > area[6]
    assert result.best.step == max(area, key=area.__getitem__) == 2
    for name in (*metrics[:-2], "r2"):
        if isinstance(name, str) and name not in ("confusion", "perplexity"):
            assert BestMetric.parse(f"valid/{name}").end == "highest"


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("classes", {0: 1.0, 2: 3.0}),
        pytest.param("binary", {1: 0.1, 0: 2}, marks=pytest.mark.thorough),
    ],
)
def test_a_weight_by_class_is_that_of_its_rows_in_training_alone(name: str, weights):
    loss, data, params, _ = LOSSES[name]
    if name == "binary":
        data = {**data, "y": np.abs(data["y"] - 0.1).astype(np.float32)}  # 0.9 is the label 1
    each = np.array([weights.get(round(float(label)), 1.0) for label in data["y"]], np.float32)
    call = dict(steps=4, batch=16, every=1, lr=0.1, quiet=True)
    valid = {"valid": data}
    by_class = jt.fit(loss, params, data, class_weight=weights, valid=valid, **call)
    by_row = jt.fit(loss, params, {**data, "weight": each * data["weight"]}, valid=valid, **call)
    for key in by_row.history:
        assert by_class.history[key] == pytest.approx(by_row.history[key], rel=1e-5), key


def missing(y_true, y_pred):
    return y_true == y_pred


TEN = jt.classifier(lambda params, x: jnp.tile(x, (1, 3))[:, :10])


@pytest.mark.parametrize(
    ("loss", "options", "error", "says"),
    [
        (TEN, {"metrics": ["acuracy"]}, ConfigError, "did you mean accuracy"),
        (TEN, {"metrics": ["acc"]}, ConfigError, "did you mean accuracy"),
        (TEN, {"metrics": [missing]}, LossError, "and it takes"),
        (TEN, {"sample_weight": X[:, 0]}, ConfigError, r"dict\(x=.*weight="),
        (TEN, {"valid": 20}, ConfigError, "valid=0.2"),
        (TEN, {"metrics": ["auc"]}, LossError, "of two classes.* write .accuracy"),
        (TEN, {"metrics": ["top_11"]}, LossError, r"top=10"),
        (TEN, {"metrics": ["r2"]}, ConfigError, "of numbers, and the loss predicts classes"),
        (TEN, {"class_weight": {10: 1.0}}, LossError, r"10 classes, 0 \.\. 9"),
        (TEN, {"class_weight": {1: -1.0}}, ConfigError, "its weight 0 or more"),
        (jt.regression(one), {"class_weight": {0: 1.0}}, ConfigError, "Give each row a weight"),
        (missed, {"class_weight": {0: 1.0}}, ConfigError, "is for a loss that is built"),
        (TEN, {"trackers": ["tensorboard"]}, ConfigError, 'name="mine"'),
    ],
)
def test_what_a_metric_or_a_weight_lacks_is_named(loss, options, error, says: str):
    with pytest.raises(error, match=says):
        jt.fit(loss, W, (X, CLASSES), steps=1, quiet=True, **options)


def test_one_hot_rows_of_integers_are_named():
    with pytest.raises(LossError, match=r"astype\(np.float32\), or give labels, y.argmax\(-1\)"):
        jt.fit(TEN, W, (X, np.eye(10, dtype=int)[CLASSES]), steps=1, quiet=True)


def test_a_function_yields_the_batches():
    def batches():
        for start in (0, 16):
            yield X[start : start + 16], CLASSES[start : start + 16]

    def named():
        yield from ({"x": x, "y": y, "weight": np.ones(16)} for x, y in batches())

    call = dict(steps=5, lr=0.1, every=1, quiet=True)
    found = [jt.fit(jt.classifier(three), W, data, **call).history for data in (batches, named)]
    rows = jt.data.LoaderBatches(named, size=16)
    want = jt.fit(jt.classifier(three), W, rows, **call).history
    assert_close(list(found[0]["loss"].values()), list(want["loss"].values()), 1e-6)
    assert found[1] == want
    with pytest.raises(jt.errors.DataError, match="Give the function that makes it"):
        jt.fit(jt.classifier(three), W, batches(), **call)
    collated = lambda: map(list, batches())
    assert jt.fit(jt.classifier(three), W, collated, **call).history == found[0]
    with pytest.raises(jt.errors.DataError, match="yields 4 arrays"):
        jt.fit(jt.classifier(three), W, lambda: ((x, y, y, y) for x, y in batches()), **call)
    with pytest.raises(LossError, match="name it 'weight'"):
        jt.fit(jt.classifier(three), W, dict(x=X, y=CLASSES, sample_weight=X[:, 0]), **call)


def test_a_saved_result_predicts_with_the_net_that_was_trained():
    from flax import nnx

    make = lambda seed: nnx.Sequential(
        nnx.Linear(4, 3, rngs=nnx.Rngs(seed)), nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    )
    result = jt.fit(jt.classifier(make(0)), make(0), (X, CLASSES), steps=3, lr=0.1, quiet=True)
    run, want = jt.load(result.save("mine.safetensors")), result.predict(X)
    assert run.step == 3
    for apply in (make(1), jt.classifier(make(1))):
        np.testing.assert_array_equal(run.predict(X, apply), want)
    assert_close(run.load_into(make(1))(X), want, 1e-6)
