"""What holds for every loss. A new member is a new row of MEMBERS, with its plain formula."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, assert_leaves_close

from jtrain.losses.balance import balance, z_loss
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.cross_entropy import (
    binary_cross_entropy,
    cross_entropy,
    distillation,
    soft_cross_entropy,
)
from jtrain.losses.elbo import elbo
from jtrain.losses.next_token import next_token
from jtrain.losses.squared_error import huber, squared_error

pytestmark = pytest.mark.usefixtures("strict_dtypes")
ROWS = 6
DRAW = np.random.default_rng(0)


def plain_nats(logits, labels):
    chances = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    return -jnp.log(jnp.take_along_axis(chances, labels[..., None], -1)[..., 0])


def plain_divergence(student, teacher):
    """KL at temperature 2, times its square."""
    chances = lambda z: jnp.exp(z / 2) / jnp.exp(z / 2).sum(-1, keepdims=True)
    p, q = chances(teacher), chances(student)
    return 4 * (p * jnp.log(p / q)).sum(-1)


def latent_loss(outputs, targets, mask):
    """The bound's second part alone, of the mean `outputs` and the log variance `targets`."""
    parts, metrics = elbo(jnp.zeros(len(mask)), outputs, targets, mask, beta=3.0)
    assert parts.coefficients == (1.0, 3.0)
    return parts.means[1], {"kl": metrics["kl"]}


def plain_balance(logits):
    """Of rows b t e whose tokens are all real: the same number for each token of a row."""
    chosen = jax.lax.top_k(logits, 2)[1]
    shares = jax.lax.stop_gradient(jax.nn.one_hot(chosen, logits.shape[-1]).sum(-2)).mean(1) / 2
    chances = (jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)).mean(1)
    of_row = logits.shape[-1] * (shares * chances).sum(-1)
    return jnp.broadcast_to(of_row[:, None], logits.shape[:2])


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
normal = lambda *shape: DRAW.standard_normal(shape).astype(np.float32)
labels = lambda *shape: DRAW.integers(0, 7, shape).astype(np.int32)
CLASSES = 3 * normal(ROWS, 7), labels(ROWS), ROW_MASK
TOKENS = 3 * normal(ROWS, 5, 7), labels(ROWS, 5), TOKEN_MASK
NUMBERS = normal(ROWS, 3), normal(ROWS, 3), ROW_MASK
HEAD = jnp.asarray(DRAW.integers(-2, 3, (7, 4)) / 2, jnp.float32)  # whole in bfloat16 too
accuracy = lambda z, y: (z.argmax(-1) == y).astype(jnp.float32)
same_class = lambda z, y: (z.argmax(-1) == y.argmax(-1)).astype(jnp.float32)
distance = lambda z, y: abs(z - y).mean(-1)
log_chances = lambda z: jnp.log(jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True))


def alone(term: Callable, arrays: tuple, plain: Callable) -> Row:
    """Return the row of a term of the logits alone, which is its own metric."""
    plain_of = lambda z, _: plain(z)
    return Row(lambda z, _, m: (term(z, m), {"x": term(z, m)}), *arrays, plain_of, plain_of)


MEMBERS = {
    "cross_entropy": Row(cross_entropy, *CLASSES, plain_nats, accuracy),
    "smoothed cross_entropy": Row(
        lambda z, y, m: cross_entropy(z, y, m, smoothing=0.3),
        *CLASSES,
        lambda z, y: 0.7 * plain_nats(z, y) - 0.3 * log_chances(z).mean(-1),
        accuracy,
    ),
    "soft_cross_entropy": Row(
        soft_cross_entropy,
        *(3 * normal(ROWS, 7), DRAW.dirichlet(np.ones(7), ROWS).astype(np.float32), ROW_MASK),
        lambda z, p: -(p * log_chances(z)).sum(-1),
        same_class,
    ),
    "distillation": Row(
        lambda z, y, m: distillation(z, y, m, temperature=2.0),
        *(3 * normal(ROWS, 7), 3 * normal(ROWS, 7), ROW_MASK),
        plain_divergence,
        same_class,
    ),
    "next_token": Row(next_token, *TOKENS, plain_nats, accuracy),
    "chunked_next_token": Row(
        lambda x, y, m: chunked_next_token(x, HEAD, y, m, chunk=2),
        *(normal(ROWS, 5, 4), labels(ROWS, 5), TOKEN_MASK),
        lambda x, y: plain_nats(x @ HEAD.T, y),
        lambda x, y: accuracy(x @ HEAD.T, y),
    ),
    "z_loss": alone(z_loss, TOKENS, lambda z: jnp.log(jnp.exp(z).sum(-1)) ** 2),
    "balance of experts": alone(
        lambda z, m: balance(z[:, None], m, top_k=2),
        (3 * normal(ROWS, 5, 4), normal(1), np.repeat(ROW_MASK[:, None], 5, 1)),
        plain_balance,
    ),
    "squared_error": Row(squared_error, *NUMBERS, lambda z, y: ((z - y) ** 2).mean(-1), distance),
    "huber": Row(
        lambda z, y, m: huber(z, y, m, delta=0.8),
        *NUMBERS,
        lambda z, y: jnp.where(abs(z - y) < 0.8, (z - y) ** 2 / 2, 0.8 * (abs(z - y) - 0.4)).mean(
            -1
        ),
        distance,
    ),
    "binary_cross_entropy": Row(
        binary_cross_entropy,
        *(3 * normal(ROWS, 3), DRAW.uniform(size=(ROWS, 3)).astype(np.float32), ROW_MASK),
        lambda z, y: (y * jnp.log(1 + jnp.exp(-z)) + (1 - y) * jnp.log(1 + jnp.exp(z))).mean(-1),
        lambda z, y: ((z > 0) == (y > 0.5)).mean(-1),
    ),
    "kl of elbo": Row(
        latent_loss,
        *NUMBERS,
        lambda m, v: ((m**2 + jnp.exp(v) - 1 - v) / 2).sum(-1),
        lambda m, v: ((m**2 + jnp.exp(v) - 1 - v) / 2).sum(-1),
    ),
}


class Compiled(NamedTuple):
    """A row on the device, with its programs: each is compiled once for all tests."""

    row: Row
    run: Callable  # (outputs, targets, mask) -> what the loss returns
    slope: Callable  # (outputs, targets, mask) -> the mean and its gradient
    plain: Callable  # (outputs, targets) -> the plain formula, and the metric
    arrays: tuple[jax.Array, jax.Array, jax.Array]


@functools.cache
def compiled(name) -> Compiled:
    row = MEMBERS[name]
    mean = lambda *x: (lambda m: m.total / jax.lax.stop_gradient(m.weight))(row.loss(*x)[0])
    return Compiled(
        row,
        jax.jit(row.loss),
        jax.jit(jax.value_and_grad(mean)),
        jax.jit(lambda *x: (row.plain(*x), row.metric(*x))),
        tuple(jnp.asarray(x) for x in (row.outputs, row.targets, row.mask)),
    )


@pytest.fixture(params=MEMBERS, name="loss")
def _loss(request) -> Compiled:
    return compiled(request.param)


def test_is_the_mean_of_the_plain_formula_and_its_gradient_where_the_mask_holds(loss):
    outputs, targets, mask = loss.arrays
    value, metrics = loss.run(*loss.arrays)
    plain, plain_metric = (np.asarray(x)[mask] for x in loss.plain(outputs, targets))
    assert_close(value.value(), plain.mean(), 2e-5)
    (metric,) = metrics.values()
    assert_close(metric.value(), plain_metric.mean(), 2e-5)
    count = float(np.asarray(mask).sum())
    formula = lambda z: jnp.where(mask, loss.row.plain(z, targets), 0.0).sum() / count
    assert_close(loss.slope(*loss.arrays)[1], jax.jit(jax.grad(formula))(outputs), 5e-6)


@pytest.mark.thorough
def test_splitting_the_rows_changes_nothing_and_the_weight_is_the_masks(loss):
    outputs, targets, mask = loss.arrays
    whole = loss.run(*loss.arrays)
    halves = [loss.run(*(part(x) for x in loss.arrays)) for part in (_first, _rest)]
    added = jax.tree.map(lambda a, b: np.asarray(a) + np.asarray(b), *halves)
    assert_leaves_close(added, whole, 1e-6)
    assert loss.run(2 * outputs, targets, mask)[0].weight == whole[0].weight > 0
    nothing, _ = loss.run(outputs, targets, np.zeros_like(mask))
    assert nothing.weight == nothing.total == 0


def _first(x):
    return x[:3] if len(x) == ROWS else x


def _rest(x):
    return x[3:] if len(x) == ROWS else x


def test_what_the_mask_hides_may_be_nan(loss):
    outputs, _, mask = (np.asarray(x) for x in loss.arrays)
    seen = np.expand_dims(mask, tuple(range(mask.ndim, outputs.ndim)))
    spoilt = np.where(seen, outputs, np.float32(np.nan))
    assert np.isnan(spoilt).any()
    (value, grad), (clean, clean_grad) = (
        loss.slope(jnp.asarray(x), *loss.arrays[1:]) for x in (spoilt, outputs)
    )
    assert_close(value, clean, 1e-6)
    seen = np.broadcast_to(seen, grad.shape)
    assert_close(np.asarray(grad)[seen], np.asarray(clean_grad)[seen], 1e-6)
    assert not np.asarray(grad)[~seen].any()


@pytest.mark.sampled(2)
def test_sums_half_precision_in_float32_and_float64_in_float64(loss):
    outputs, *rest = loss.arrays
    half = outputs.astype(jnp.bfloat16)
    value, grad = loss.slope(half, *rest)
    assert (value.dtype, grad.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(value, loss.slope(half.astype(jnp.float32), *rest)[0], 1e-6)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        arrays = map(np.asarray, loss.arrays)
        wide = [np.float64(x) if x.dtype == np.float32 else x for x in arrays]
        assert jax.eval_shape(loss.row.loss, *wide)[0].total.dtype == np.float64
