"""Gradients of embeddings in half precision, and of positions."""

import jax
import jax.numpy as jnp
import numpy as np
from comparison import assert_close

from jtrain.models.layers.embedding import add_positions, look_up, take_rows


def test_the_gradient_of_a_frequent_token_grows_to_its_end_in_bfloat16():
    index = jnp.zeros((2, 1000), jnp.int32)
    table = jnp.ones((3000, 4), jnp.bfloat16)
    for take in (look_up, take_rows):
        _, back = jax.vjp(take, table, index)
        grad, _ = back(jnp.ones((2, 1000, 4), jnp.bfloat16))
        assert grad.dtype == jnp.bfloat16
        assert np.array_equal(grad[0].astype(np.float32), np.full(4, 2000))
        assert not grad[1:].any()


def test_positions_have_the_gradient_of_a_sum_over_rows():
    draw = np.random.default_rng(0)
    x, upstream = (jnp.float32(draw.normal(size=(6, 5, 4))) for _ in range(2))
    positions = jnp.float32(draw.normal(size=(5, 4)))
    value, back = jax.vjp(add_positions, x, positions)
    assert np.array_equal(value, x + positions[None])
    grad_x, grad_positions = back(upstream)
    assert np.array_equal(grad_x, upstream)
    assert_close(grad_positions, upstream.sum(0), 1e-6, terms=abs(upstream).sum())
