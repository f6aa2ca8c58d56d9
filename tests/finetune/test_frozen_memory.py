"""Frozen weights in fewer bits: no dense copy stays from the forward to the backward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.layers.low_rank import LowRank
from jtrain.models.layers.quantized import Quantized, quantize

DRAW = np.random.default_rng(0)
X, KERNEL = (jnp.asarray(DRAW.normal(size=shape), jnp.float32) for shape in ((12, 64), (64, 128)))
A, B = (jnp.asarray(DRAW.normal(size=shape), jnp.float32) for shape in ((64, 2), (2, 128)))
STORED = {
    "as_is": KERNEL,
    "bfloat16": KERNEL.astype(jnp.bfloat16),
    "int8": quantize(KERNEL, "int8"),
    "nf4": quantize(KERNEL, "nf4"),
}
low_rank = lambda kind: LowRank(STORED[kind], A, B, None, 0.5, 0.0, transposed=False)


def output(kind, a, x):
    """Return x W + the term, with `a` in the place of its A, through the layer's own functions."""
    low = dataclasses.replace(low_rank(kind), a=a)
    return low.product(lambda x, w: jnp.tanh(x @ w), x) + low.term(x, flat=True)


@pytest.mark.parametrize("kind", STORED)
def test_the_backward_pass_makes_dense_weights_again(kind):
    pull = jax.vjp(lambda a, x: output(kind, a, x), A, X)[1]
    saved = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull)]
    assert ((KERNEL.shape, jnp.float32) in saved) == (kind == "as_is"), saved
    if isinstance(frozen := STORED[kind], Quantized):
        assert (frozen.codes.shape, frozen.codes.dtype) in saved


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "nf4"])
def test_value_and_gradient_are_those_of_dense_weights(kind):
    dense = low_rank(kind).dense()
    plain = lambda a, x: jnp.tanh(x @ dense) + 0.5 * (x @ a @ B)
    both = lambda f: jax.jit(jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), (0, 1)))(A, X)
    (value, found), (want, gradient) = both(lambda a, x: output(kind, a, x)), both(plain)
    assert_close(value, want, 1e-6)
    for one, other in zip(found, gradient, strict=True):
        assert_close(one, other, 1e-6)
