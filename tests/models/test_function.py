"""Bare functions as a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import LossError
from jtrain.models.adapters.function import from_function

KEY = jax.random.key(0)


def init(key):
    return [jax.random.normal(key, (3,))]


def test_a_function_gets_what_it_has_arguments_for():
    seen = {}

    def apply(params, x, y, train, rng=None):
        seen.update(train=train, rng=rng)
        return params[0] * x + y

    model = from_function(init, apply)
    params, extra = model.init(KEY)
    outputs, same = model.apply(params, extra, jnp.ones(3), jnp.ones(3), rng=KEY)
    np.testing.assert_array_equal(outputs, params[0] + 1)
    assert extra == same == {}
    assert seen == {"train": True, "rng": KEY}
    model.apply(params, extra, jnp.ones(3), jnp.ones(3))
    assert seen == {"train": False, "rng": None}


def test_state_goes_in_and_out_beside_the_outputs():
    model = from_function(
        lambda key: (init(key), {"calls": jnp.int32(0)}),
        lambda params, x, extra: (x, {"calls": extra["calls"] + 1}),
    )
    params, extra = model.init(KEY)
    assert extra == {"calls": 0}
    assert model.apply(params, extra, jnp.ones(3), train=True)[1] == {"calls": 1}


@pytest.mark.parametrize("what", ["init", "apply"])
def test_state_that_does_not_come_back_is_refused(what):
    pair = lambda *args, **kwargs: (1, 2)
    give = {"init": (init, lambda p, extra: (p, extra)), "apply": (pair, lambda p, extra: p)}[what]
    model = from_function(*give)
    with pytest.raises(
        ValueError, match=rf"so {what}.*returned a list. Return both, or take `extra`"
    ):
        model.init(KEY) if what == "init" else model.apply([1], {}, train=True)


def test_arguments_without_names_are_refused():
    with pytest.raises(
        ValueError, match=r"rng, train that it names, and `apply` takes `\*\*rest`. Name the"
    ):
        from_function(init, lambda params, **rest: params)


@pytest.mark.parametrize("first", [None, KEY])
def test_inputs_in_the_order_of_before_are_refused(first):
    model = from_function(init, lambda params, x: x)
    with pytest.raises(LossError, match=r"takes the inputs after the parameters.*rng=jt.row_keys"):
        model.apply(model.init(KEY)[0], {}, first, False, jnp.ones(3))
