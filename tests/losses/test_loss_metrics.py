"""Metrics against plain loops over the rows, whole and in parts, with rows that do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.mean import Mean
from jtrain.losses.calibration import calibration, expected_calibration_error
from jtrain.losses.metrics import accuracy
from jtrain.losses.next_token import perplexity

pytestmark = pytest.mark.usefixtures("strict_dtypes")
DRAW = np.random.default_rng(0)
ROWS, CLASSES = 40, 5
LOGITS = (2 * DRAW.standard_normal((ROWS, CLASSES))).astype(np.float32)
LOGITS[:6] = np.round(LOGITS[:6])  # some are equal
LABELS = DRAW.integers(0, CLASSES, ROWS).astype(np.int32)
MASK = DRAW.random(ROWS) < 0.7
SEEN = np.flatnonzero(MASK)


def in_parts(metric):
    """Summed over parts of other sizes, what is hidden NaN."""
    spoilt = jnp.asarray(np.where(MASK[:, None], LOGITS, np.nan))
    labels, mask = jnp.asarray(LABELS), jnp.asarray(MASK)
    cuts = [slice(0, 8), slice(8, ROWS)]
    parts = [jax.jit(metric)(spoilt[cut], labels[cut], mask[cut]) for cut in cuts]
    return jax.tree.map(lambda *x: sum(x), *parts)


@pytest.mark.thorough
def test_a_label_that_is_no_class_is_a_miss():
    outside = jnp.array([-1, CLASSES], jnp.int32)
    for top in (1, CLASSES):
        assert accuracy(jnp.asarray(LOGITS[:2]), outside, jnp.ones(2, bool), top=top).total == 0


@pytest.mark.thorough
def test_the_calibration_error_is_that_of_the_whole_however_it_was_split():
    bins = 15
    chances = np.exp(LOGITS[SEEN].astype(np.float64))
    sure = (chances / chances.sum(1, keepdims=True)).max(1)
    right = LOGITS[SEEN].argmax(1) == LABELS[SEEN]
    want = 0.0
    for i in range(bins):
        inside = (sure > i / bins) & (sure <= (i + 1) / bins)
        if inside.any():
            want += inside.mean() * abs(sure[inside].mean() - right[inside].mean())
    got = in_parts(lambda *x: calibration(*x, bins=bins))
    assert expected_calibration_error(got) == pytest.approx(want, rel=1e-5)
    assert got["right"].weight.sum() == len(SEEN)


def test_perplexity_is_of_the_whole():
    even, sure = Mean(2 * jnp.log(8.0), jnp.float32(2)), Mean(jnp.float32(0), jnp.float32(1))
    assert perplexity(even) == pytest.approx(8)
    both = Mean(even.total + sure.total, even.weight + sure.weight)
    assert perplexity(both) == pytest.approx(4)  # 8^(2/3); the mean of parts would say 5.67
    assert perplexity(1e4) == np.inf
    assert np.isnan([perplexity(np.nan), perplexity(Mean(0.0, 0.0))]).all()
