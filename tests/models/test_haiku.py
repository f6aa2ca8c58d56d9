"""Any haiku function, and bare functions, as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core.rows import row_keys
from jtrain.models.adapters import from_function
from jtrain.models.adapters.libraries import from_haiku

hk = pytest.importorskip("haiku")

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
KEY = jax.random.key(1)


def net(x, is_training):
    x = hk.BatchNorm(True, True, 0.9)(hk.nets.MLP([5, 3])(x), is_training)
    return hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x


@pytest.fixture(scope="module", name="built")
def _built():
    model = from_haiku(hk.transform_with_state(net), jax.ShapeDtypeStruct(X.shape, X.dtype))
    return model, *jax.jit(model.init)(jax.random.key(0))


@pytest.mark.thorough
def test_computes_what_the_function_computes(built):
    model, params, extra = built
    theirs = hk.transform_with_state(net)
    outputs, same = model.apply(params, extra, X)
    np.testing.assert_array_equal(outputs, theirs.apply(params, extra, None, X, False)[0])
    assert same is extra
    outputs, after = model.apply(params, extra, X, rng=KEY)
    want, state = theirs.apply(params, extra, KEY, X, True)
    np.testing.assert_array_equal(outputs, want)
    jax.tree.map(np.testing.assert_array_equal, after, dict(state))
    assert after["batch_norm/~/mean_ema"]["counter"] == 1


@pytest.mark.thorough
def test_draws_from_the_first_of_the_rows_keys(built):
    model, params, extra = built
    run = lambda rng: np.asarray(model.apply(params, extra, X, rng=rng, train=True)[0])
    keys = row_keys(KEY, {"row": jnp.arange(8, dtype=jnp.int32)})
    np.testing.assert_array_equal(run(keys), run(keys[0]))
    assert (run(keys) != run(keys[1:])).any()


ZERO = jax.random.key(0)


def init(key):
    return [jax.random.normal(key, (3,))]


@pytest.mark.thorough
def test_a_function_gets_what_it_has_arguments_for():
    seen = {}

    def apply(params, x, y, train, rng=None):
        seen.update(train=train, rng=rng)
        return params[0] * x + y

    model = from_function(init, apply)
    params, extra = model.init(ZERO)
    outputs, same = model.apply(params, extra, jnp.ones(3), jnp.ones(3), rng=ZERO)
    np.testing.assert_array_equal(outputs, params[0] + 1)
    assert extra == same == {}
    assert seen == {"train": True, "rng": ZERO}
    model.apply(params, extra, jnp.ones(3), jnp.ones(3))
    assert seen == {"train": False, "rng": None}


def test_state_goes_in_and_out_beside_the_outputs():
    model = from_function(
        lambda key: (init(key), {"calls": jnp.int32(0)}),
        lambda params, x, extra: (x, {"calls": extra["calls"] + 1}),
    )
    params, extra = model.init(ZERO)
    assert extra == {"calls": 0}
    assert model.apply(params, extra, jnp.ones(3), train=True)[1] == {"calls": 1}
