"""Metrics of a call in one array: the same numbers by the same names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.mean import Mean
from jtrain.train.calls.packed_metrics import PackedMetrics, join_calls, pack_metrics, select

MEANS = {"loss": Mean(jnp.float32(6), jnp.float32(4)), "a/b": Mean(jnp.float32(0), jnp.float32(0))}


def run(means):
    return jax.jit(pack_metrics(lambda state, batch: (state, batch)))(0, means)[1]


def test_scalars_come_as_one_array_with_the_same_names_and_numbers():
    metrics = run(MEANS)
    assert isinstance(metrics, PackedMetrics)
    assert len(jax.tree.leaves(metrics)) == 1
    assert list(metrics) == ["a/b", "loss"]
    assert metrics["loss"].value() == 1.5
    assert np.isnan(metrics["a/b"].value())
    with pytest.raises(KeyError, match="typo"):
        metrics["typo"]
    assert select(metrics, ["loss"]) is metrics


def test_stacked_steps_keep_their_axis():
    stacked = jax.lax.map(run, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), MEANS))
    np.testing.assert_array_equal(stacked["loss"].total, [6, 12])
    assert jax.tree.map(lambda x: x[1], stacked)["loss"].weight == 8


@pytest.mark.parametrize("total", [jnp.ones(3), jnp.int32(3)])
def test_other_metrics_are_left_as_they_are(total):
    means = MEANS | {"other": Mean(total, jnp.float32(1))}
    assert not isinstance(run(means), PackedMetrics)
    assert list(select(run(means), ["loss", "typo"])) == ["loss"]


@pytest.mark.parametrize("pack", [pack_metrics, lambda step: step], ids=["packed", "apart"])
def test_calls_are_joined_whether_or_not_they_have_a_dim_of_steps(pack):
    take = jax.jit(lambda means: pack(lambda state, batch: (state, batch))(0, means)[1])
    twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), MEANS)
    for means, steps in ((MEANS, 1), (twice, 2)):
        metrics = jax.lax.map(take, means) if steps == 2 else take(means)
        joined = join_calls([jax.tree.map(np.asarray, metrics)] * 2)
        np.testing.assert_array_equal(joined["loss"].total, [6, 12][:steps] * 2)
        np.testing.assert_array_equal(joined["a/b"].weight, [0] * 2 * steps)
