"""InfoNCE and two towers: the formulas, hidden rows, and one gradient under every split."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance
from layouts import step_under
from tiny_configs import TINY, write_pairs

from jtrain.config.resolve import resolve
from jtrain.core.placement import Unplaced
from jtrain.losses.contrastive import contrastive, info_nce
from jtrain.models.embeddings import map_rows
from jtrain.parallel import Mirrored

ROOT = Path(__file__).parents[2]
DRAW = np.random.default_rng(0)
ANCHORS, POSITIVES = jnp.asarray(DRAW.standard_normal((2, 10, 6)), jnp.float32)
NEGATIVES = jnp.asarray(DRAW.standard_normal((10, 3, 6)), jnp.float32)
MASK = jnp.arange(10) % 5 != 3


def in_numpy(anchors, positives, negatives, temperature):
    """Compute the loss and the accuracy row by row."""
    unit = lambda x: np.asarray(x, np.float64) / np.linalg.norm(np.float64(x), axis=-1)[..., None]
    candidates = [*unit(positives), *unit(negatives).reshape(-1, 6)]
    losses, hits = [], []
    for i, anchor in enumerate(unit(anchors)):
        scores = np.array([anchor @ candidate for candidate in candidates]) / temperature
        losses.append(np.log(np.exp(scores).sum()) - scores[i])
        hits.append(scores.argmax() == i)
    return np.mean(losses), np.mean(hits)


@pytest.mark.thorough
def test_gives_the_formula_over_the_rows_that_count_and_no_other_has_a_gradient():
    spoil = lambda x: jnp.where(MASK.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)
    spoilt = [spoil(x) for x in (ANCHORS, POSITIVES, NEGATIVES)]
    value, metrics = jax.jit(functools.partial(info_nce, temperature=0.3))(*spoilt, MASK)
    want, hits = in_numpy(ANCHORS[MASK], POSITIVES[MASK], NEGATIVES[MASK], 0.3)
    assert_close(value.value(), want, 1e-6)
    assert_close(metrics["accuracy"].value(), hits, 1e-6)
    assert value.weight == MASK.sum()
    total = lambda *x: info_nce(*x, MASK)[0].total
    for grad in jax.jit(jax.grad(total, (0, 1, 2)))(ANCHORS, POSITIVES, NEGATIVES):
        assert not grad[~MASK].any()
        assert np.abs(grad[MASK]).max() > 1e-3


@pytest.fixture(scope="module", name="pairs")
def _pairs(tmp_path_factory):
    """Return the loss by chunks, its parameters and a batch of 8 rows."""
    path = write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 40)

    def build(chunks):
        # Cosines are rounded to 6e-8 and divided by the temperature: at 0.2 two programs are 6e-7
        # apart in their scores, and 1.03e-6 in the gradient with the instructions of SSE4.2.
        words = ["model.dropout=0.2", "temperature=1.0"]
        settings = [*TINY["embeddings"], f"data.path={path}", *words]
        found = resolve(ROOT / "configs" / "embeddings.yaml", [*settings, f"chunks={chunks}"])
        return found.config.build(Unplaced())

    x = build(1)
    params, _ = jax.jit(x.init)(jax.random.key(0))
    params = jax.device_get(jax.tree.map(lambda leaf: 4 * leaf, params))
    return lambda chunks: build(chunks).loss, params, dict(x.train[0])


@pytest.fixture(scope="module", name="whole")
def _whole(pairs):
    """Return the loss and the gradient of all rows at once on one device."""
    return step_of(pairs, Mirrored(devices=1), 1)


def step_of(pairs, layout, chunks):
    """Return the loss and the gradient of a step; dropout is drawn."""
    loss, params, batch = pairs
    return step_under(layout, loss(chunks), params, batch, rows_interact="batch")


SPLITS = [(4, 2), (1, 4), (2, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("devices", "chunks"),
    [pytest.param(d, c, marks=() if (d, c) == (4, 2) else pytest.mark.slow) for d, c in SPLITS],
)
def test_loss_and_gradient_are_those_of_the_whole_batch(pairs, whole, devices, chunks):
    want, gradient = whole
    loss, found = step_of(pairs, Mirrored(devices=devices), chunks)
    assert_close(loss, want, 1e-6)
    assert distance(found, gradient) <= 1e-6


@pytest.mark.thorough
def test_map_rows_gives_the_rows_in_their_order():
    rows = {"x": jnp.arange(24.0).reshape(12, 2), "y": jnp.arange(12.0)}
    call = lambda some: some["x"] * some["y"][:, None]
    for chunks in (1, 3, 12):
        np.testing.assert_array_equal(map_rows(call, rows, chunks), call(rows))


LEFT, RIGHT = jnp.asarray(DRAW.standard_normal((2, 16, 6)), jnp.float32)
SEEN = jnp.arange(16) % 5 != 3


def of_towers(left, right, log_scale):
    """Compute the pseudo-code of the paper over the given rows."""
    left, right = (np.asarray(x, np.float64) for x in (left, right))
    left, right = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (left, right))
    logits = left @ right.T * np.exp(log_scale)
    own = np.arange(len(left))
    rows = np.log(np.exp(logits).sum(1)) - logits[own, own]
    columns = np.log(np.exp(logits).sum(0)) - logits[own, own]
    return (rows.mean() + columns.mean()) / 2, (logits.argmax(1) == own).mean()


@pytest.mark.thorough
def test_towers_give_the_formula_over_the_rows_that_count():
    spoilt = [jnp.where(SEEN[:, None], x, jnp.nan) for x in (LEFT, RIGHT)]
    value, metrics = jax.jit(contrastive)(*spoilt, jnp.float32(1.2), SEEN)
    want, hits = of_towers(LEFT[SEEN], RIGHT[SEEN], 1.2)
    assert_close(value.value(), want, 1e-6)
    assert_close(metrics["accuracy"].value(), hits, 1e-6)


@pytest.mark.thorough
def test_the_gradient_is_the_slope_and_hidden_rows_have_none():
    mean = lambda left, s: contrastive(left, RIGHT, s, SEEN)[0].total / SEEN.sum()
    spoilt = jnp.where(SEEN[:, None], LEFT, jnp.nan)
    grad, by_scale = jax.jit(jax.grad(mean, (0, 1)))(spoilt, jnp.float32(1.2))
    assert not grad[~SEEN].any()
    slope = lambda f: (f(1e-5) - f(-1e-5)) / 2e-5
    assert_close(by_scale, slope(lambda e: of_towers(LEFT[SEEN], RIGHT[SEEN], 1.2 + e)[0]), 1e-4)
    way = np.float64(RIGHT[SEEN])
    moved = lambda e: of_towers(np.float64(LEFT[SEEN]) + e * way, RIGHT[SEEN], 1.2)[0]
    along = grad[SEEN] * way
    assert_close(along.sum(), slope(moved), 1e-6, terms=np.abs(along).sum())


@pytest.mark.thorough
def test_a_scale_beyond_a_hundred_is_a_hundred():
    run = jax.jit(contrastive)
    steep, bound = (run(LEFT, RIGHT, jnp.float32(s), SEEN)[0] for s in (9, np.log(100)))
    assert_close(steep.total, bound.total, 1e-5)
    of = lambda s: contrastive(LEFT, RIGHT, s, SEEN)[0].total
    assert jax.jit(jax.grad(of))(jnp.float32(9)) == 0
