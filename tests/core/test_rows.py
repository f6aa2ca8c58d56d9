"""A row draws the same wherever it is, and a full batch needs no row and no mask."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys, with_rows
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.errors import LossError


@pytest.mark.thorough
def test_a_row_draws_by_its_place_in_the_whole_batch():
    key, rows = jax.random.key(5), jnp.arange(8)
    draw = lambda rows: jax.vmap(jax.random.uniform)(row_keys(key, {"row": rows}))
    whole = draw(rows)
    np.testing.assert_array_equal(draw(rows[3:5]), whole[3:5])
    np.testing.assert_array_equal(draw(rows[::-1]), whole[::-1])
    assert len(set(whole.tolist())) == 8


def test_row_and_mask_are_those_of_a_full_batch_where_there_are_none():
    got = with_rows({"x": jnp.ones((3, 2))})
    assert (got["row"].tolist(), got["mask"].tolist()) == ([0, 1, 2], [True] * 3)
    kept = with_rows({"x": jnp.ones(2), "mask": jnp.array([True, False])})
    assert kept["mask"].tolist() == [True, False]


def test_arrays_of_other_rows_are_named():
    for other in (jnp.float32(0.5), jnp.ones(2)):
        with pytest.raises(LossError, match=r"'alpha': \((2,)?\), 'x': \(3, 2\)"):
            with_rows({"x": jnp.ones((3, 2)), "alpha": other})
    assert len(with_rows({"x": jnp.ones((3, 2)), "alpha": jnp.full(3, 0.5)})["mask"]) == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "partitionable", "x64"),
    [("threefry2x32", False, False), ("rbg", True, True), ("unsafe_rbg", True, False)],
)
def test_a_row_draws_the_same_by_every_generator(impl, partitionable, x64):
    with jax.enable_x64(x64), jax.threefry_partitionable(partitionable):
        key, rows, some = jax.random.key(5, impl=impl), np.arange(8), np.array([2, 3] * 4)
        normal = jax.vmap(lambda key: jax.random.normal(key, (3,)))
        draw = jax.jit(lambda key, rows: normal(row_keys(key, {"row": rows})))
        whole = np.asarray(draw(key, rows))
        np.testing.assert_array_equal(draw(key, rows[::-1]), whole[::-1])
        np.testing.assert_array_equal(draw(key, some), whole[some])
        other = np.asarray(draw(jax.random.key(6, impl=impl), rows))
        assert len(np.unique([whole, other])) == 48


@pytest.mark.thorough
def test_a_step_that_draws_is_the_same_however_it_is_split():
    def loss(params, batch, rng):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(row_keys(rng, batch))
        return Mean.of(jnp.square(noise @ params), batch["mask"])

    ends = []
    with jax.default_prng_impl("rbg"):
        for microbatches in (1, 4):
            state = new_state(jnp.arange(1.0, 4.0), optax.sgd(0.1), jax.random.key(0))
            step = jax.jit(make_step(loss, optax.sgd(0.1), microbatches=microbatches))
            ends.append(step(state, {"x": np.zeros(8, np.float32)})[0].params)
    assert_close(*ends, 1e-6)
