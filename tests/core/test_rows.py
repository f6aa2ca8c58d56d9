"""A row draws the same wherever it is, and a full batch needs no row and no mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.rows import row_keys, with_rows
from jtrain.errors import LossError


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
