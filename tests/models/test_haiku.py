"""Any haiku function as pure functions."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.core.pytree import describe
from jtrain.core.rows import row_keys
from jtrain.errors import UserError
from jtrain.models.adapters.haiku import from_haiku

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


def test_trees_are_plain_dicts_with_names(built):
    _, params, extra = built
    assert type(params) is type(extra) is dict
    assert describe(params)["mlp/~/linear_0/w"] == "float32[4, 5]"
    assert describe(extra)["batch_norm/~/mean_ema/counter"] == "int32[]"


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


def test_draws_from_the_first_of_the_rows_keys(built):
    model, params, extra = built
    run = lambda rng: np.asarray(model.apply(params, extra, X, rng=rng, train=True)[0])
    keys = row_keys(KEY, {"row": jnp.arange(8, dtype=jnp.int32)})
    np.testing.assert_array_equal(run(keys), run(keys[0]))
    assert (run(keys) != run(keys[1:])).any()


def test_a_function_without_state_takes_none():
    model = from_haiku(hk.transform(lambda x: hk.Linear(3)(x)), X)
    params, extra = model.init(KEY)
    assert extra == {}
    assert model.apply(params, extra, X, train=True)[0].shape == (8, 3)


def test_drawing_without_a_key_is_refused(built):
    model, params, extra = built
    with pytest.raises(ValueError, match=r"rng=None. Pass the loss's `rng`"):
        model.apply(params, extra, X, train=True)


def test_what_is_not_transformed_is_refused():
    with pytest.raises(ValueError, match=r"got function. Write from_haiku\(hk.transform_with"):
        from_haiku(net, X)


def test_without_haiku_the_line_to_type_is_told(monkeypatch):
    transformed = hk.transform_with_state(net)
    monkeypatch.setitem(sys.modules, "haiku", None)
    with pytest.raises(
        ValueError, match=r"haiku, which is not installed. Type: pip install dm-haiku"
    ):
        from_haiku(transformed, X)


def test_a_function_without_its_state_is_told_where_the_state_comes_from():
    switched = lambda x, is_training: hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), is_training)
    model = from_haiku(hk.transform_with_state(switched), X)
    params, _ = model.init(KEY)
    with pytest.raises(UserError, match=r"(?s)carries more than parameters.*model.init\(key\)"):
        jt.evaluate(jt.classifier(model), params, (X, np.zeros(8, np.int32)))
