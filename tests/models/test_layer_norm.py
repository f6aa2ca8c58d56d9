"""Layer, group and batch norm against autodiff and float64, and their running statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from flax import nnx

import jtrain as jt
from jtrain.core.mean import Mean
from jtrain.models.adapters import mean_of_slices
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.layers.norms import EPSILON, BatchNorm, GroupNorm, layer_norm, standardize_rows

pytestmark = pytest.mark.usefixtures("strict_dtypes")

DRAW = np.random.default_rng(0)
X, SCALE, BIAS, WAY = (
    jnp.asarray(DRAW.standard_normal(shape), jnp.float32)
    for shape in ((3, 5, 16), 16, 16, (3, 5, 16))
)


def plain(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale[None, None] + bias[None, None]


@pytest.mark.thorough
def test_value_and_gradients_are_autodiffs():
    got, pull = jax.vjp(layer_norm, 3 + 2 * X, SCALE, BIAS)
    expected, pull_plain = jax.vjp(plain, 3 + 2 * X, SCALE, BIAS)
    assert_close(got, expected, 2e-6)
    for ours, theirs in zip(pull(WAY), pull_plain(WAY), strict=True):
        assert_close(ours, theirs, 5e-6)


@pytest.mark.thorough
def test_takes_its_statistics_in_float32():
    half = (100 + X).astype(jnp.bfloat16)
    ones, zeros = jnp.ones(16, jnp.bfloat16), jnp.zeros(16, jnp.bfloat16)
    got = layer_norm(half, ones, zeros)
    exact = plain(half.astype(jnp.float32), jnp.ones(16), jnp.zeros(16))
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), exact, 1e-2)


IMAGES = (3 + 2 * np.random.default_rng(0).standard_normal((4, 3, 5, 6))).astype(np.float32)


def plain_groups(x, groups):
    split = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean, var = split.mean((1, 3), keepdims=True), split.var((1, 3), keepdims=True)
    return ((split - mean) / jnp.sqrt(var + EPSILON)).reshape(x.shape)


def test_gives_the_numbers_and_the_gradient_of_the_formula():
    norm, x, way = GroupNorm(6, groups=2), jnp.asarray(IMAGES), jnp.asarray(np.sin(IMAGES))
    assert_close(norm(x), plain_groups(x, 2), 2e-6)
    of = lambda fn: jax.jit(jax.grad(lambda x: (fn(x) * way).sum()))(x)
    assert_close(of(norm), of(lambda x: plain_groups(x, 2)), 5e-6)


PIXELS = (3 + 2 * DRAW.standard_normal((6, 4, 5, 3))).astype(np.float32)
MASK = np.array([True, True, False, True, False, True])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm = BatchNorm(3)
        self.norm.scale.set_value(jnp.array([1.0, 2.0, 0.5]))
        self.norm.bias.set_value(jnp.array([0.0, -1.0, 3.0]))

    def __call__(self, x, mask=None):
        return self.norm(x, mask)


@pytest.fixture(scope="module", name="net")
def _net():
    model = from_nnx(Net)
    return jax.jit(model.apply, static_argnames="train"), *model.init(jax.random.key(0))


def test_outputs_and_running_statistics_are_by_the_rows_that_are_shown(net):
    apply, params, extra = net
    junk = np.where(MASK[:, None, None, None], PIXELS, np.float32(1e6))
    y, after = apply(params, extra, junk, MASK, train=True)
    seen = PIXELS[MASK].astype(np.float64)
    centred = (seen - seen.mean((0, 1, 2))) / np.sqrt(seen.var((0, 1, 2)) + EPSILON)
    assert_close(y[MASK], centred * [1.0, 2.0, 0.5] + [0.0, -1.0, 3.0], 2e-6)
    mean, var = after["norm"]["mean"], after["norm"]["var"]
    assert isinstance(mean, Mean)
    assert mean.weight == var.weight == 4.0
    assert_close(mean.value(), 0.1 * seen.mean((0, 1, 2)), 1e-5)
    unbiased = seen.var((0, 1, 2), ddof=1)
    assert_close(var.value(), 0.9 + 0.1 * unbiased, 1e-5)


def test_a_batch_without_a_row_moves_no_statistic(net):
    apply, params, extra = net
    y, after = apply(params, extra, PIXELS, np.zeros(6, bool), train=True)
    assert np.isfinite(y).all()
    assert after["norm"]["mean"].weight == 0


def test_evaluation_uses_the_running_ones_and_leaves_them(net):
    apply, params, _ = net
    extra = {"norm": {"mean": jnp.array([1.0, 2.0, 3.0]), "var": jnp.array([4.0, 1.0, 9.0])}}
    y, same = apply(params, extra, PIXELS)
    want = (PIXELS - [1.0, 2.0, 3.0]) / np.sqrt(np.array([4.0, 1.0, 9.0]) + EPSILON)
    assert_close(y, want * [1.0, 2.0, 0.5] + [0.0, -1.0, 3.0], 2e-6)
    jax.tree.map(np.testing.assert_array_equal, same, extra)


def plain_rows(x, real):
    seen = real[:, None, None, None]
    count = real.sum() * x.shape[1] * x.shape[2]
    mean = (seen * x).sum((0, 1, 2), keepdims=True) / count
    var = (seen * jnp.square(x - mean)).sum((0, 1, 2), keepdims=True) / count
    return (x - mean) / jnp.sqrt(var + EPSILON)


@pytest.mark.thorough
def test_the_gradient_is_autodiffs_of_the_plain_formula():
    real, way = jnp.asarray(MASK, jnp.float32), jnp.asarray(np.sin(PIXELS))
    of = lambda norm: jax.jit(jax.grad(lambda x: (norm(x, real) * way).sum()))(jnp.asarray(PIXELS))
    ours = of(lambda x, real: standardize_rows(x, real)[0])
    assert_close(ours, of(plain_rows), 5e-6)


@pytest.mark.thorough
def test_frozen_statistics_stay_and_couple_no_rows():
    """Training with frozen statistics is the evaluation of a norm with the same statistics."""
    frozen = from_nnx(lambda rngs: BatchNorm(3, epsilon=0.5, frozen=True))
    params, extra = frozen.init(jax.random.key(0))
    extra = {"mean": jnp.array([1.0, 2.0, 3.0]), "var": jnp.array([4.0, 1.0, 0.25])}
    y, after = frozen.apply(params, extra, jnp.asarray(PIXELS), train=True)
    want = (PIXELS - np.array([1.0, 2.0, 3.0])) / np.sqrt(np.array([4.0, 1.0, 0.25]) + 0.5)
    assert_close(y, want, 2e-6)
    jax.tree.map(np.testing.assert_array_equal, after, extra)
    assert (frozen.rows_interact, from_nnx(lambda rngs: BatchNorm(3)).rows_interact) == (
        "never",
        "batch",
    )


ROWS = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
OLD = {"mean": jnp.full(3, 0.1), "count": jnp.int32(2**24 - 1), "fixed": jnp.ones(2)}


def loss(params, extra, batch, rng):
    seen = jnp.where(batch["mask"][:, None], batch["x"], 0).sum(0) / batch["mask"].sum()
    new = {**extra, "mean": 0.9 * extra["mean"] + 0.1 * seen, "count": extra["count"] + 1}
    value = jt.Mean.of(params * batch["x"][:, 0], batch["mask"])
    return value, {}, mean_of_slices(extra, new, batch["mask"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "split", [{"rows_interact": "batch"}, {"rows_interact": "slice", "microbatches": 2}]
)
def test_slices_count_by_their_real_rows(split):
    mask = np.arange(12) < 9  # slices of rows 0 2 4 6 8 and 1 3 5 7
    batch = {"x": ROWS, "row": np.arange(12, dtype=np.int32), "mask": mask}
    optimizer = optax.sgd(0.1)
    state = jt.new_state(jnp.float32(1), optimizer, jax.random.key(0), OLD)
    step = jt.make_step(jt.stateful(loss), optimizer, ragged=True, **split)
    with jax.numpy_dtype_promotion("standard"):  # the step's own
        got = jax.jit(step)(state, batch)[0].extra
    assert_close(got["mean"], 0.9 * 0.1 + 0.1 * ROWS[:9].mean(0), 1e-6)
    assert got["count"] == 2**24
    np.testing.assert_array_equal(got["fixed"], OLD["fixed"])
