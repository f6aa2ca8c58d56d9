"""Statistics of a foreign layer come back whole: bit for bit, or by the share of real rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.models.adapters.library_modules import mean_of_slices

X = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
OLD = {"mean": jnp.full(3, 0.1), "count": jnp.int32(2**24 - 1), "fixed": jnp.ones(2)}
BATCH = {"x": X, "row": np.arange(12, dtype=np.int32), "mask": np.ones(12, bool)}


def loss(params, extra, batch, rng):
    seen = jnp.where(batch["mask"][:, None], batch["x"], 0).sum(0) / batch["mask"].sum()
    new = {**extra, "mean": 0.9 * extra["mean"] + 0.1 * seen, "count": extra["count"] + 1}
    value = jt.Mean.of(params * batch["x"][:, 0], batch["mask"])
    return value, {}, mean_of_slices(extra, new, batch["mask"])


def after(batch, **settings):
    optimizer = optax.sgd(0.1)
    state = jt.new_state(jnp.float32(1), optimizer, jax.random.key(0), OLD)
    step = jt.make_step(jt.stateful(loss), optimizer, **settings)
    return jax.jit(step)(state, batch)[0].extra


@pytest.mark.parametrize("real", [12, 7])
def test_what_saw_the_whole_batch_is_kept_as_it_came(real):
    batch = {**BATCH, "mask": np.arange(12) < real}
    got = after(batch, couples="batch", ragged=True)
    want = jax.jit(lambda seen: 0.9 * OLD["mean"] + 0.1 * seen)(X[:real].sum(0) / np.float32(real))
    assert_close(got["mean"], want, 1e-6)
    assert got["count"] == 2**24
    np.testing.assert_array_equal(got["fixed"], OLD["fixed"])


def test_slices_count_by_their_real_rows():
    batch = {**BATCH, "mask": np.arange(12) < 9}  # slices of rows 0 2 4 6 8 and 1 3 5 7
    got = after(batch, couples="slice", microbatches=2, ragged=True)
    assert_close(got["mean"], 0.9 * 0.1 + 0.1 * X[:9].mean(0), 1e-6)
    assert got["count"] == 2**24


def test_a_slice_that_is_hidden_whole_counts_for_nothing():
    batch = {**BATCH, "mask": np.arange(12) % 2 == 0}  # the second slice computes 0 / 0
    got = after(batch, couples="slice", microbatches=2, ragged=True)
    assert_close(got["mean"], 0.9 * 0.1 + 0.1 * X[::2].mean(0), 1e-6)


def test_a_batch_that_is_hidden_whole_leaves_the_old():
    got = after({**BATCH, "mask": np.zeros(12, bool)}, couples="batch", ragged=True)
    jax.tree.map(np.testing.assert_array_equal, got, OLD)
