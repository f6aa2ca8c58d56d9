"""Names, sizes, norms and casts of the leaves of a tree."""

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.core import pytree

TREE = {
    "blocks": [{"kernel": jnp.full((2, 3), 2.0)}],
    "low": jnp.ones(4, jnp.bfloat16),
    "n": jnp.arange(2),
}


def test_a_leaf_is_named_by_its_path():
    assert list(pytree.named_leaves(TREE)) == ["blocks/0/kernel", "low", "n"]
    assert pytree.describe(TREE)["blocks/0/kernel"] == "float32[2, 3]"


def test_counts_numbers():
    assert pytree.num_elements(TREE) == 12
    assert pytree.num_elements({}) == 0


def test_the_norm_is_over_all_leaves():
    some = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0, jnp.bfloat16)}
    assert float(pytree.norm(some)) == 5.0
    assert pytree.norm({}) == 0


def test_the_norm_of_complex_numbers_is_of_their_modulus():
    some = {"a": jnp.array([3 + 4j, 12j], jnp.complex64), "b": jnp.float32(1)}
    assert float(pytree.norm(some)) == pytest.approx(170**0.5)


def test_the_norm_of_sixteen_bits_is_summed_in_thirty_two():
    assert float(pytree.norm(jnp.ones(10_000, jnp.bfloat16))) == pytest.approx(100, rel=1e-6)
    assert np.isfinite(float(pytree.norm(jnp.full(4, 300.0, jnp.float16))))


def test_only_short_floats_are_widened():
    wide = pytree.at_least_f32(TREE)
    assert (wide["low"].dtype, wide["n"].dtype) == (jnp.float32, TREE["n"].dtype)
    assert wide["blocks"][0]["kernel"] is TREE["blocks"][0]["kernel"]
