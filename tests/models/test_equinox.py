"""Any equinox module as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.core.rows import row_keys
from jtrain.errors import LossError
from jtrain.models.adapters.libraries import from_equinox

eqx = pytest.importorskip("equinox")

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
KEY = jax.random.key(1)
KEYS = row_keys(KEY, {"row": jnp.arange(8, dtype=jnp.int32)})


class Net(eqx.Module):
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


@pytest.fixture(scope="module", name="net")
def _net():
    model = from_equinox(eqx.nn.make_with_state(Net))
    return model, *jax.jit(model.init)(jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("train", [True, False])
def test_computes_what_the_module_computes(net, train):
    model, params, extra = net
    module, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
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


@pytest.mark.thorough
def test_a_row_drops_by_its_own_key_wherever_it_stands():
    drop = lambda key: eqx.nn.Dropout(0.5)
    run = lambda x, keys: from_equinox(drop).apply({}, {}, x, rng=keys, train=True)[0]
    order = np.array([5, 2, 7])
    assert_close(run(X[order], KEYS[order]), run(X, KEYS)[order], 1e-6)
    same = run(jnp.ones((8, 4)), KEY)
    assert (same[:1] != same[1:]).any(), "a single key is folded with the row's place"


@pytest.mark.thorough
def test_gradients_are_the_modules(net):
    model, params, extra = net
    ours = jax.grad(lambda p: (model.apply(p, extra, X)[0] ** 2).sum())(params)
    module, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    run = jax.vmap(lambda m, x: eqx.nn.inference_mode(m)(x, state)[0], (None, 0), axis_name="rows")
    theirs = eqx.filter_grad(lambda m: (run(m, X) ** 2).sum())(module)
    assert_close(ours["layers"]["0"]["weight"], theirs.layers[0].weight, 1e-5)


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
