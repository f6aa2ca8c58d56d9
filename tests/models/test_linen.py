"""Any linen module as pure functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.pytree import describe
from jtrain.core.rows import row_keys
from jtrain.models.adapters.linen import from_linen

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
KEY = jax.random.key(1)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(4)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dropout(0.5, deterministic=not train, rng_collection="noise")(x)


@pytest.fixture(scope="module", name="net")
def _net():
    model = from_linen(Net(), X, streams=("dropout", "noise"))
    return model, *jax.jit(model.init)(jax.random.key(0))


def test_trees_are_plain_dicts_with_names(net):
    _, params, extra = net
    assert type(params) is type(params["Dense_0"]) is type(extra) is dict
    assert describe(params)["Dense_0/kernel"] == "float32[4, 4]"
    assert set(describe(extra)) == {f"batch_stats/BatchNorm_0/{name}" for name in ("mean", "var")}


def test_computes_what_the_module_computes(net):
    model, params, extra = net
    outputs, same = model.apply(params, extra, X)
    np.testing.assert_array_equal(outputs, Net().apply({"params": params, **extra}, X, False))
    jax.tree.map(np.testing.assert_array_equal, same, extra)


def test_statistics_of_training_come_back_in_extra(net):
    model, params, extra = net
    _, after = model.apply(params, extra, X, rng=KEY)
    inside = X @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None]
    mean = after["batch_stats"]["BatchNorm_0"]["mean"]
    assert_close(mean, 0.1 * inside.mean(0), 1e-5)


def test_draws_from_the_first_of_the_rows_keys_and_a_stream_each(net):
    model, params, extra = net
    run = lambda rng: np.asarray(model.apply(params, extra, X, rng=rng, train=True)[0])
    keys = row_keys(KEY, {"row": jnp.arange(8, dtype=jnp.int32)})
    np.testing.assert_array_equal(run(keys), run(keys[0]))
    assert (run(keys) != run(keys[1:])).any()
    assert 0.5 < (run(KEY) == 0).mean() < 0.95  # two masks of one half: three quarters are dropped


def test_a_shape_stands_for_an_input():
    model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((2, 5), jnp.float32))
    params, extra = model.init(KEY)
    assert describe(params) == {"bias": "float32[3]", "kernel": "float32[5, 3]"}
    assert extra == {}


def test_metadata_of_partitioning_is_taken_off():
    kernel = nn.with_partitioning(nn.initializers.ones, ("in", "out"))
    params, _ = from_linen(nn.Dense(3, kernel_init=kernel), X).init(KEY)
    assert isinstance(params["kernel"], jax.Array)


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic):
        return nn.Dropout(0.5, deterministic=deterministic)(x)


def test_a_module_is_told_by_the_argument_that_it_has():
    model = from_linen(Deterministic(), X)
    np.testing.assert_array_equal(model.apply({}, {}, X)[0], X)
    assert (model.apply({}, {}, X, rng=KEY)[0] == 0).any()


def test_drawing_without_a_key_is_refused():
    model = from_linen(Deterministic(), X)
    with pytest.raises(ValueError, match=r"rng=None. Pass the loss's `rng`, or train=False"):
        model.apply({}, {}, X, train=True)


def test_a_stream_without_a_name_is_refused():
    model = from_linen(Net(), X)
    params, extra = from_linen(Net(), X, streams=("dropout", "noise")).init(KEY)
    with pytest.raises(ValueError, match=r'streams dropout.*noise.*streams=\("dropout", "noise"'):
        model.apply(params, extra, X, rng=KEY)


class Anything(nn.Module):
    def __call__(self, x, **rest):
        return x


def test_arguments_without_names_are_refused():
    with pytest.raises(ValueError, match=r"linen module Anything.*`\*\*rest`. Write the switch"):
        from_linen(Anything(), X)
