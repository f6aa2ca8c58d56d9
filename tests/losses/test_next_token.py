"""Inputs, targets and real tokens of a language batch."""

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import LossError
from jtrain.losses.next_token import inputs_and_targets

TOKENS = jnp.arange(12).reshape(3, 4)


@pytest.mark.thorough
def test_targets_are_the_inputs_one_later():
    batch = {"tokens": TOKENS, "mask": jnp.ones(3, bool)}
    inputs, targets, real = inputs_and_targets(batch)
    np.testing.assert_array_equal(inputs, [[0, 1, 2], [4, 5, 6], [8, 9, 10]])
    np.testing.assert_array_equal(targets, [[1, 2, 3], [5, 6, 7], [9, 10, 11]])
    assert real.all()


def test_what_has_no_tokens_to_learn_is_refused():
    with pytest.raises(LossError, match=r"Give tokens of shape \[rows, t \+ 1\] as np.int32"):
        inputs_and_targets({"tokens": TOKENS[:, :1], "mask": jnp.ones(3, bool)})


def test_lengths_and_the_mask_hide_targets():
    batch = {
        "tokens": TOKENS,
        "mask": jnp.array([True, True, False]),
        "length": jnp.array([2, 3, 3], jnp.int32),
    }
    _, _, real = inputs_and_targets(batch)
    np.testing.assert_array_equal(real, [[1, 1, 0], [1, 1, 1], [0, 0, 0]])
