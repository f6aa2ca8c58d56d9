"""Residuals of a forward pass are counted, apart from recomputed ones."""

import jax
import jax.numpy as jnp
import pytest

from jtrain.train.auto_layout import remat_regions, saved_residuals

W, X = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((5, 8), jnp.float32)
LAYER = 5 * 8 * 4  # bytes of its output


def layer(x, w):
    return jnp.sin(x @ w), None


def loop(each):
    return lambda w, x: jnp.sum(jax.lax.scan(each, x, w)[0])


def test_a_layer_keeps_its_input_and_what_its_slope_is_computed_from():
    assert saved_residuals(loop(layer), W, X) == 2 * 3 * LAYER


def test_a_layer_that_is_computed_again_keeps_its_input_alone():
    again = loop(jax.checkpoint(layer))
    assert saved_residuals(again, W, X) == 3 * LAYER
    (part,) = remat_regions(again, W, X)
    assert part.saved_bytes == LAYER
    assert {of.shape for of in part.given} == {(5, 8), (8, 8)}


def test_arguments_themselves_are_not_counted():
    assert saved_residuals(lambda w, x: jnp.sum(w * x), X, X) == 0


def test_a_key_and_whole_numbers_may_go_into_what_is_computed_again():
    def noisy(x, at):
        rng, row = at
        return jnp.sin(x * jax.random.normal(rng, x.shape) + row), None

    def fn(x, rng):
        given = jax.random.split(rng, 2), jnp.arange(2)
        return jnp.sum(jax.lax.scan(jax.checkpoint(noisy), x, given)[0])

    (part,) = remat_regions(fn, X, jax.eval_shape(lambda: jax.random.key(0)))
    assert part.saved_bytes >= LAYER


@pytest.mark.parametrize("fn", [loop(layer), lambda w, x: jnp.sum(x)])
def test_nothing_is_computed_again_where_nobody_asked(fn):
    assert remat_regions(fn, W, X) == []
