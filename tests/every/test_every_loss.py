"""What holds for every loss. A new member is a new row of MEMBERS, with its plain formula."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.losses.cross_entropy import cross_entropy
from jtrain.losses.next_token import next_token
from jtrain.losses.squared_error import squared_error

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ROWS = 6
DRAW = np.random.default_rng(0)


def plain_nats(logits, labels):
    chances = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    return -jnp.log(jnp.take_along_axis(chances, labels[..., None], -1)[..., 0])


class Row(NamedTuple):
    """A loss, outputs and targets for it, what counts, and the plain formula of one number."""

    loss: Callable
    outputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    plain: Callable
    metric: Callable


ROW_MASK = np.array([True, True, False, True, False, True])
TOKEN_MASK = np.arange(5) < np.array([5, 3, 0, 1, 0, 4])[:, None]
accuracy = lambda z, y: (z.argmax(-1) == y).astype(jnp.float32)
normal = lambda *shape: DRAW.standard_normal(shape).astype(np.float32)
MEMBERS = {
    "cross_entropy": Row(
        cross_entropy,
        3 * normal(ROWS, 7),
        DRAW.integers(0, 7, ROWS).astype(np.int32),
        ROW_MASK,
        plain_nats,
        accuracy,
    ),
    "next_token": Row(
        next_token,
        3 * normal(ROWS, 5, 7),
        DRAW.integers(0, 7, (ROWS, 5)).astype(np.int32),
        TOKEN_MASK,
        plain_nats,
        accuracy,
    ),
    "squared_error": Row(
        squared_error,
        normal(ROWS, 3),
        normal(ROWS, 3),
        ROW_MASK,
        lambda z, y: ((z - y) ** 2).mean(-1),
        lambda z, y: abs(z - y).mean(-1),
    ),
}


@pytest.fixture(params=MEMBERS, name="row")
def _row(request) -> Row:
    row = MEMBERS[request.param]
    arrays = {name: jnp.asarray(getattr(row, name)) for name in ("outputs", "targets", "mask")}
    return row._replace(**arrays)


def mean(value):
    return value.total / jax.lax.stop_gradient(value.weight)


def test_is_the_mean_of_the_plain_formula_where_the_mask_holds(row):
    value, metrics = jax.jit(row.loss)(row.outputs, row.targets, row.mask)
    np.testing.assert_allclose(
        value.value(), row.plain(row.outputs, row.targets)[row.mask].mean(), rtol=2e-5
    )
    (metric,) = metrics.values()
    np.testing.assert_allclose(
        metric.value(), row.metric(row.outputs, row.targets)[row.mask].mean(), rtol=1e-5
    )


def test_splitting_the_rows_and_adding_up_changes_nothing(row):
    run = jax.jit(row.loss)
    whole = run(row.outputs, row.targets, row.mask)
    parts = [run(row.outputs[s], row.targets[s], row.mask[s]) for s in (slice(0, 1), slice(1, 6))]
    added = jax.tree.map(lambda a, b: a + b, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), added, whole)


def test_what_the_mask_hides_may_be_nan(row):
    seen = jnp.expand_dims(row.mask, range(row.mask.ndim, row.outputs.ndim))
    spoilt = jnp.where(seen, row.outputs, jnp.nan)
    assert jnp.isnan(spoilt).any()
    run = jax.jit(jax.value_and_grad(lambda z: mean(row.loss(z, row.targets, row.mask)[0])))
    (value, grad), (clean, clean_grad) = run(spoilt), run(row.outputs)
    np.testing.assert_allclose(value, clean, rtol=1e-6)
    seen = np.broadcast_to(seen, grad.shape)
    np.testing.assert_allclose(grad[seen], clean_grad[seen], rtol=1e-6)
    assert not np.asarray(grad)[~seen].any()


def test_the_weight_depends_on_the_mask_alone(row):
    value, _ = row.loss(row.outputs, row.targets, row.mask)
    other, _ = row.loss(row.outputs * 2, row.targets, row.mask)
    assert value.weight == other.weight > 0
    nothing, _ = row.loss(row.outputs, row.targets, jnp.zeros_like(row.mask))
    assert nothing.weight == nothing.total == 0


def test_the_gradient_is_autodiffs_of_the_plain_formula(row):
    ours = jax.jit(jax.grad(lambda z: mean(row.loss(z, row.targets, row.mask)[0])))(row.outputs)
    count = float(np.asarray(row.mask).sum())
    plain = lambda z: jnp.where(row.mask, row.plain(z, row.targets), 0.0).sum() / count
    np.testing.assert_allclose(ours, jax.grad(plain)(row.outputs), rtol=2e-5, atol=1e-7)


def test_the_gradient_is_the_slope(row):
    loss = jax.jit(lambda z: mean(row.loss(z, row.targets, row.mask)[0]))
    way = jnp.asarray(np.random.default_rng(1).standard_normal(row.outputs.shape), jnp.float32)
    slope = (loss(row.outputs + 1e-2 * way) - loss(row.outputs - 1e-2 * way)) / 2e-2
    along = (jax.grad(loss)(row.outputs) * way).sum()
    np.testing.assert_allclose(slope, along, rtol=2e-2)  # float32 differences: some 1e-3 off


def test_half_precision_is_summed_in_full(row):
    half = jnp.asarray(row.outputs, jnp.bfloat16)
    value, _ = row.loss(half, row.targets, row.mask)
    exact, _ = row.loss(half.astype(jnp.float32), row.targets, row.mask)
    assert value.total.dtype == jnp.float32
    np.testing.assert_allclose(value.total, exact.total, rtol=1e-6)
    grad = jax.grad(lambda z: row.loss(z, row.targets, row.mask)[0].total)(half)
    assert grad.dtype == jnp.bfloat16
