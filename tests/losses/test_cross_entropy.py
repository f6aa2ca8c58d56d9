"""Labels of every kind: whole, smoothed, soft, out of range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.mean import Terms
from jtrain.losses.balance import z_loss
from jtrain.losses.cross_entropy import cross_entropy, cross_entropy_per_label, soft_cross_entropy

pytestmark = pytest.mark.usefixtures("strict_dtypes")
LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5)), jnp.float32)
LABELS = jnp.array([0, 4, 2, 2], jnp.int32)
ALL = jnp.ones(4, bool)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothed_labels_are_these_soft_labels(smoothing):
    soft = (1 - smoothing) * jax.nn.one_hot(LABELS, 5) + smoothing / 5
    whole = lambda z: cross_entropy(z, LABELS, ALL, smoothing=smoothing)[0].total
    spread = lambda z: soft_cross_entropy(z, soft, ALL)[0].total
    (got, grad), (want, wanted) = (jax.jit(jax.value_and_grad(f))(LOGITS) for f in (whole, spread))
    assert_close(got, want, 1e-6)
    assert_close(grad, wanted, 2e-6)


def test_a_label_out_of_range_has_the_loss_of_the_nearest_class():
    got = cross_entropy_per_label(LOGITS, jnp.array([-3, 5, 99, 2], jnp.int32))
    np.testing.assert_array_equal(
        got, cross_entropy_per_label(LOGITS, jnp.array([0, 4, 4, 2], jnp.int32))
    )


def test_a_class_that_cannot_be_costs_nothing_where_no_label_asks_for_it():
    barred = LOGITS.at[:, 1].set(-jnp.inf)
    soft = jax.nn.one_hot(LABELS, 5)
    loss = lambda z: soft_cross_entropy(z, soft, ALL)[0].total
    value, grad = jax.jit(jax.value_and_grad(loss))(barred)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    assert_close(value, cross_entropy_per_label(barred, LABELS).sum(), 1e-6)


def test_the_z_loss_is_a_term_with_a_coefficient_of_its_own():
    value, _ = cross_entropy(LOGITS, LABELS, ALL)
    terms = value + 1e-4 * z_loss(LOGITS, ALL)
    assert isinstance(terms, Terms)
    assert terms.coefficients == (1.0, 1e-4)
    assert_close(terms.means[1].value(), np.square(np.log(np.exp(LOGITS).sum(-1))).mean(), 1e-6)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_a_smoothing_that_is_no_share_is_refused(smoothing):
    with pytest.raises(ValueError, match=rf"smoothing {smoothing} .*0 \.\. 1: smoothing=0\.1"):
        cross_entropy(LOGITS, LABELS, ALL, smoothing=smoothing)
    cross_entropy(LOGITS, LABELS, ALL, smoothing=0.1)


def test_soft_labels_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"5 classes and the chances 4\. .*shape \(4, 5\)"):
        soft_cross_entropy(LOGITS, jnp.ones((4, 4)) / 4, ALL)
    soft_cross_entropy(LOGITS, jnp.ones((4, 5)) / 5, ALL)
