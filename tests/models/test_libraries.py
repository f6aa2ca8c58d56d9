"""Modules of flax, haiku and equinox, and bare functions, as pure functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from flax import nnx

from jtrain.core.pytree import describe, named_leaves
from jtrain.core.rows import row_keys
from jtrain.errors import LossError
from jtrain.models.adapters.libraries import from_equinox, from_linen
from jtrain.models.adapters.nnx import from_nnx

eqx = pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
KEY = jax.random.key(1)


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


KEYS = row_keys(KEY, {"row": jnp.arange(8, dtype=jnp.int32)})


class EquinoxNet(eqx.Module):
    layers: list
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    offset: jax.Array
    act: object

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(4, 4, key=k) for k in jax.random.split(key, 2)]
        self.norm = eqx.nn.BatchNorm(4, "rows", momentum=0.9, mode="ema")
        self.drop, self.act = eqx.nn.Dropout(0.5), jax.nn.relu
        self.offset = jnp.arange(4)

    def __call__(self, x, state, *, key=None):
        for layer in self.layers:
            x = self.act(layer(x))
        x, state = self.norm(x + self.offset, state)
        return self.drop(x, key=key), state


@pytest.fixture(scope="module", name="equinox_net")
def _equinox():
    model = from_equinox(eqx.nn.make_with_state(EquinoxNet))
    return model, *jax.jit(model.init)(jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("train", [True, False])
def test_computes_what_the_equinox_module_computes(equinox_net, train):
    model, params, extra = equinox_net
    module, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    module = eqx.nn.inference_mode(module, not train)
    keys = KEYS if train else None
    theirs = jax.vmap(
        lambda x, state, key: module(x, state, key=key), (0, None, 0), (0, None), axis_name="rows"
    )
    want, after = theirs(X, state, keys)
    got, new = model.apply(params, extra, X, rng=keys, train=train)
    assert_close(got, want, 1e-6)
    for a, b in zip(jax.tree.leaves(new["state"]), jax.tree.leaves(after), strict=True):
        assert_close(a, b, 1e-6)
    moved = any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (new, extra)), strict=True))
    assert moved == train


class Largest(eqx.Module):
    """Remembers the sum of a row, or the mean of those of all rows."""

    index: eqx.nn.StateIndex
    mean: bool

    def __init__(self, mean):
        self.index, self.mean = eqx.nn.StateIndex(jnp.zeros(())), mean

    def __call__(self, x, state):
        found = jax.lax.pmean(x.sum(), "batch") if self.mean else x.sum()
        return x, state.set(self.index, found)


def test_a_state_that_differs_by_row_is_refused_and_the_advice_works():
    make = lambda mean: from_equinox(lambda key: eqx.nn.make_with_state(Largest)(mean))
    params, extra = make(False).init(KEY)
    with pytest.raises(LossError, match=r"Store its mean over them: jax.lax.pmean\(x, 'batch'\)"):
        make(False).apply(params, extra, X, train=True)
    _, after = make(True).apply(params, extra, X, train=True)
    assert_close(jax.tree.leaves(after)[0], np.asarray(X).sum(1).mean(), 1e-6, terms=X)
