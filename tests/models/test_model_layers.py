"""Layers: dropout, embeddings, linear maps, gelu and the perceptron, against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance
from flax import nnx

from jtrain.models.classifiers import MLP
from jtrain.models.layers.dropout import KeySequence, drop
from jtrain.models.layers.feed_forward import gelu
from jtrain.models.layers.linear import Linear, add_positions, look_up, take_rows

KEYS = jax.random.split(jax.random.key(0), 4)
X = jnp.ones((4, 50, 40))


@pytest.mark.thorough
def test_keeps_the_mean_and_drops_the_rate():
    y = np.asarray(jax.jit(lambda x: drop(x, 0.25, KEYS))(X))
    assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
    dropped = (y == 0).mean((1, 2))  # of 2000 a row: 4 standard errors are 0.04
    assert_close(dropped, 0.25, 0.04, terms=1)


@pytest.mark.thorough
def test_sites_and_rows_draw_apart():
    first, second = (drop(X, 0.5, KEYS, site=site) for site in (0, 1))
    assert 0.4 < (first == second).mean() < 0.6
    assert 0.4 < (first[0] == first[1]).mean() < 0.6


def test_is_the_identity_without_keys_or_rate():
    assert drop(X, 0.5, None) is X
    assert drop(X, 0.0, KEYS) is X


@pytest.mark.thorough
def test_the_gradient_of_a_frequent_token_grows_to_its_end_in_bfloat16():
    index = jnp.zeros((2, 1000), jnp.int32)
    table = jnp.ones((3000, 4), jnp.bfloat16)
    for take in (look_up, take_rows):
        _, back = jax.vjp(take, table, index)
        grad, _ = back(jnp.ones((2, 1000, 4), jnp.bfloat16))
        assert grad.dtype == jnp.bfloat16
        assert np.array_equal(grad[0].astype(np.float32), np.full(4, 2000))
        assert not grad[1:].any()


@pytest.mark.thorough
def test_positions_have_the_gradient_of_a_sum_over_rows():
    draw = np.random.default_rng(0)
    x, upstream = (jnp.float32(draw.normal(size=(6, 5, 4))) for _ in range(2))
    positions = jnp.float32(draw.normal(size=(5, 4)))
    value, back = jax.vjp(add_positions, x, positions)
    assert np.array_equal(value, x + positions[None])
    grad_x, grad_positions = back(upstream)
    assert np.array_equal(grad_x, upstream)
    assert_close(grad_positions, upstream.sum(0), 1e-6, terms=abs(upstream).sum())


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.thorough
def test_the_gradient_of_a_table_is_that_of_float64():
    """Check the sum in blocks; terms added one after the other are off by 2.3e-6 here."""
    b, t, v, d = 32, 4096, 4, 4
    tokens = np.random.default_rng(1).integers(v, size=(b, t)).astype(np.int32)
    up = 1 + normal(b, t, d)
    loss = lambda table: (look_up(table, jnp.asarray(tokens)) * up).sum()
    want = np.zeros((v, d))
    np.add.at(want, tokens.ravel(), np.float64(up).reshape(-1, d))
    assert distance(jax.jit(jax.grad(loss))(jnp.zeros((v, d))), want) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(8, 1), (1, 8)], ids=["one output", "one input"])
def test_the_gradient_of_a_thin_map_is_that_of_float64(sizes: tuple[int, int]):
    """Check the product in blocks; as one product it is off by 4e-6 and 6e-6 here."""
    layer = Linear(*sizes, bias=False, std=1.0, rngs=KeySequence(jax.random.key(0)))
    x, up = 1 + normal(65_536, sizes[0]), normal(65_536, sizes[1], seed=1)
    graph, params = nnx.split(layer)
    loss = lambda params: (nnx.merge(graph, params)(jnp.asarray(x)) * up).sum()
    got = jax.jit(jax.grad(loss))(params)["kernel"][...]
    want = np.float64(x).T @ np.float64(up)
    assert distance(got, want.reshape(got.shape)) < 1e-6


POINTS = jnp.linspace(-30, 30, 2001, dtype=jnp.float32)


@pytest.mark.thorough
def test_value_and_slope_are_jaxs():
    theirs = lambda x: jax.nn.gelu(x, approximate=True)
    assert_close(gelu(POINTS), theirs(POINTS), 1e-6, terms=1)
    slope, expected = (jax.vmap(jax.grad(f))(POINTS) for f in (gelu, theirs))
    assert_close(slope, expected, 1e-5)  # tails cancel in float32


@pytest.mark.thorough
def test_half_precision_is_computed_in_full():
    half = POINTS.astype(jnp.bfloat16)
    assert gelu(half).dtype == jax.grad(lambda x: gelu(x).sum())(half).dtype == jnp.bfloat16
    exact = gelu(half.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gelu(half), exact)


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)


@pytest.mark.thorough
def test_gives_the_logits_of_the_formula():
    widths = (8, 20)
    model = MLP(inputs=12, classes=4, widths=widths).build()
    params, _ = jax.jit(model.init)(jax.random.key(0))
    x = IMAGES.reshape(5, 12).astype(np.float64) / 255
    for i in range(len(widths) + 1):
        kernel = np.asarray(params["layers"][str(i)]["kernel"], np.float64)
        x = x @ (kernel if kernel.shape[0] == x.shape[1] else kernel.T)
        x = np.maximum(x, 0) if i < len(widths) else x
    logits, _ = jax.jit(model.apply)(params, {}, IMAGES)
    assert_close(logits, x, 5e-6)
