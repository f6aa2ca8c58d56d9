"""Gradients of large batches that XLA:CPU adds one after the other are added in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import distance
from flax import nnx

from jtrain.models.layers.dropout import KeySequence
from jtrain.models.layers.embedding import count_blocks, look_up
from jtrain.models.layers.linear import Linear, thin_product


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens_below(vocabulary: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(vocabulary, size=shape).astype(np.int32)


def test_the_gradient_of_a_table_is_that_of_float64():
    """Check the sum in blocks; terms added one after the other are off by 2.3e-6 here."""
    b, t, v, d = 32, 4096, 4, 4
    tokens, up = tokens_below(v, b, t), 1 + normal(b, t, d)
    loss = lambda table: (look_up(table, jnp.asarray(tokens)) * up).sum()
    want = np.zeros((v, d))
    np.add.at(want, tokens.ravel(), np.float64(up).reshape(-1, d))
    assert distance(jax.jit(jax.grad(loss))(jnp.zeros((v, d))), want) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "rows", "blocks"),
    [
        (1024, 65, 1),  # small batches
        (8191, 65, 1),
        (8192, 65, 2),
        (131_072, 65, 32),
        (1_048_576, 65, 32),
        (131_072, 50_257, 1),  # large tables
        (131_072, 8192, 2),
    ],
)
def test_blocks_are_long_and_their_sums_small(tokens: int, rows: int, blocks: int):
    assert count_blocks(tokens, rows) == blocks


def test_what_is_looked_up_is_the_row_wherever_it_stands():
    table, index = jnp.asarray(normal(5, 3)), jnp.asarray(tokens_below(5, 4, 2048))
    assert count_blocks(index.size, 5) == 2
    np.testing.assert_array_equal(look_up(table, index), table[index])


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


@pytest.mark.parametrize("rows", [7, 2047, 2048, 3000, 4096])
def test_a_thin_product_is_the_product(rows: int):
    x, kernel = normal(rows, 3), normal(3, 1, seed=1)
    assert distance(thin_product(jnp.asarray(x), jnp.asarray(kernel)), x @ kernel) < 1e-6
