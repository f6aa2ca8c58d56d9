"""Any module of flax, nnx and linen, as pure functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from flax import nnx

from jtrain.core.pytree import describe, named_leaves
from jtrain.core.rows import row_keys
from jtrain.models.adapters.libraries import from_linen
from jtrain.models.adapters.nnx import from_nnx

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.noise(self.dropout(self.norm(x)))


@pytest.fixture(scope="module", name="net")
def _net():
    model = from_nnx(Net)
    params, extra = jax.jit(model.init)(jax.random.key(0))
    return jax.jit(model.apply, static_argnames="train"), params, extra


def plain(module, x):
    for layer in module.layers:
        x = layer(x)
    return x


@pytest.mark.thorough
def test_trees_are_plain_dicts_with_names(net):
    _, params, extra = net
    assert type(params) is type(params["layers"]) is dict
    assert set(params["layers"]) == {str(i) for i in range(11)}
    assert describe(params)["layers/10/kernel"] == "float32[4, 4]"
    assert describe(extra) == {"norm/mean": "float32[4]", "norm/var": "float32[4]"}
    assert all(isinstance(leaf, jax.Array) for leaf in named_leaves((params, extra)).values())


@pytest.mark.thorough
def test_computes_what_the_module_computes(net):
    apply, params, extra = net
    module = Net(nnx.Rngs(jax.random.key(0)))
    module.eval()
    outputs, same = apply(params, extra, X)
    assert_close(outputs, module(X), 2e-6)
    jax.tree.map(np.testing.assert_array_equal, same, extra)


@pytest.mark.thorough
def test_statistics_of_training_come_back_in_extra(net):
    apply, params, extra = net
    _, after = apply(params, extra, X, rng=jax.random.key(1))
    inside = plain(Net(nnx.Rngs(jax.random.key(0))), X)
    assert_close(after["norm"]["mean"], 0.01 * inside.mean(0), 1e-5)
    assert_close(after["norm"]["var"], 0.99 + 0.01 * inside.var(0), 2e-6)


@pytest.mark.thorough
def test_draws_from_the_key_it_is_given_and_from_nothing_else(net):
    apply, params, extra = net
    run = lambda seed: np.asarray(apply(params, extra, X, rng=jax.random.key(seed))[0])
    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()
    assert 0.5 < (run(1) == 0).mean() < 0.95  # two masks of one half: three quarters are dropped


@pytest.mark.thorough
def test_gradients_are_the_modules(net):
    apply, params, extra = net
    grads = jax.grad(lambda p: (apply(p, extra, X)[0] ** 2).sum())(params)
    module = Net(nnx.Rngs(jax.random.key(0)))
    module.eval()
    theirs = nnx.to_pure_dict(nnx.grad(lambda m: (m(X) ** 2).sum())(module))
    for i in range(11):
        ours = grads["layers"][str(i)]["kernel"]
        expected = theirs["layers"][i]["kernel"]
        assert_close(ours, expected, 1e-5)


KEY = jax.random.key(1)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(4)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dropout(0.5, deterministic=not train, rng_collection="noise")(x)


@pytest.fixture(scope="module", name="linen")
def _linen():
    model = from_linen(LinenNet(), X, streams=("dropout", "noise"))
    return model, *jax.jit(model.init)(jax.random.key(0))


@pytest.mark.thorough
def test_computes_what_the_linen_module_computes(linen):
    model, params, extra = linen
    outputs, same = model.apply(params, extra, X)
    np.testing.assert_array_equal(outputs, LinenNet().apply({"params": params, **extra}, X, False))
    jax.tree.map(np.testing.assert_array_equal, same, extra)


@pytest.mark.thorough
def test_statistics_of_a_linen_module_come_back_in_extra(linen):
    model, params, extra = linen
    _, after = model.apply(params, extra, X, rng=KEY)
    inside = X @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None]
    mean = after["batch_stats"]["BatchNorm_0"]["mean"]
    assert_close(mean, 0.1 * inside.mean(0), 1e-5)


def test_draws_from_the_first_of_the_rows_keys_and_a_stream_each(linen):
    model, params, extra = linen
    run = lambda rng: np.asarray(model.apply(params, extra, X, rng=rng, train=True)[0])
    keys = row_keys(KEY, {"row": jnp.arange(8, dtype=jnp.int32)})
    np.testing.assert_array_equal(run(keys), run(keys[0]))
    assert (run(keys) != run(keys[1:])).any()
    assert 0.5 < (run(KEY) == 0).mean() < 0.95  # two masks of one half: three quarters are dropped


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic):
        return nn.Dropout(0.5, deterministic=deterministic)(x)


def test_a_module_is_told_by_the_argument_that_it_has():
    model = from_linen(Deterministic(), X)
    np.testing.assert_array_equal(model.apply({}, {}, X)[0], X)
    assert (model.apply({}, {}, X, rng=KEY)[0] == 0).any()
