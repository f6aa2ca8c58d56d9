"""int8 and NF4 weights against numpy and the published table, and no dense copy of them kept."""

import dataclasses
import functools
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.layers.low_rank import NF4, LowRank, Quantized, dequantize, quantize

DRAW = np.random.default_rng(0)


def in_numpy(x, bits):
    """Return codes and the values they stand for, block by block and number by number."""
    flat = np.concatenate([x.ravel(), np.zeros(-x.size % 64, np.float32)])
    codes, values = [], []
    for block in flat.reshape(-1, 64):
        scale = np.abs(block).max() * (np.float32(1 / 127) if bits == "int8" else np.float32(1))
        for number in block:
            ratio = number / scale if scale else np.float32(0)
            if bits == "int8":
                code = int(np.rint(ratio))
                value = np.float32(code) * scale
            else:
                code = int(np.abs(NF4.astype(np.float64) - ratio).argmin())
                value = NF4[code] * scale
            codes.append(code)
            values.append(value)
    return codes, np.float32(values)[: x.size].reshape(x.shape)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_codes_and_values_are_those_of_a_loop_in_numpy(bits):
    x = DRAW.normal(size=(5, 13)).astype(np.float32)
    x[0] = 0
    stored = jax.jit(lambda x: quantize(x, bits))(x)
    codes, values = in_numpy(x, bits)
    found = np.asarray(stored.codes)
    if bits == "nf4":
        found = np.stack([found >> 4, found & 15], -1)
    np.testing.assert_array_equal(found.ravel(), codes)
    np.testing.assert_array_equal(jax.jit(dequantize)(stored), values)


@pytest.mark.thorough
def test_a_stack_is_quantized_layer_by_layer():
    x = jnp.asarray(DRAW.normal(size=(3, 10, 7)), jnp.float32)
    stored = quantize(x, "nf4", stack=1)
    assert stored.codes.shape == (3, 2, 32)
    for i in range(3):
        np.testing.assert_array_equal(dequantize(stored)[i], dequantize(quantize(x[i], "nf4")))


@pytest.mark.thorough
def test_blocks_of_the_last_dim_are_those_of_the_flat_array():
    """Dims stay where 64 divides the last one, and the numbers are those of any other shape."""
    bits = "nf4"
    x = jnp.asarray(DRAW.normal(size=(2, 6, 128)), jnp.float32)
    stored, flat = quantize(x, bits, stack=1), quantize(x.reshape(-1), bits)
    assert stored.scales.shape == (2, 6, 2)
    assert stored.codes.shape == (2, 6, 2, 64 if bits == "int8" else 32)
    np.testing.assert_array_equal(stored.codes.ravel(), flat.codes.ravel())
    np.testing.assert_array_equal(dequantize(stored).ravel(), dequantize(flat))


def test_the_table_is_the_published_one():
    """Quantiles of a normal as bitsandbytes' create_normal_map makes them: offset 0.9677083."""
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    upper = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    table = np.sort([*upper, 0.0, *lower])
    assert_close(NF4, table / table.max(), 1e-6)
    assert list(NF4).count(0) == 1


X, KERNEL = (jnp.asarray(DRAW.normal(size=shape), jnp.float32) for shape in ((12, 64), (64, 128)))
A, B = (jnp.asarray(DRAW.normal(size=shape), jnp.float32) for shape in ((64, 2), (2, 128)))


@functools.cache
def stored(kind):
    """Return the kernel as it is stored."""
    if kind in ("int8", "nf4"):
        return quantize(KERNEL, kind)
    return KERNEL.astype(jnp.bfloat16) if kind == "bfloat16" else KERNEL


low_rank = lambda kind: LowRank(stored(kind), A, B, None, 0.5, 0.0, transposed=False)


def output(kind, a, x):
    """Return x W + the term, with `a` in the place of its A, through the layer's own functions."""
    low = dataclasses.replace(low_rank(kind), a=a)
    return low.product(lambda x, w: jnp.tanh(x @ w), x) + low.term(x, flat=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["as_is", "nf4"])
def test_the_backward_pass_makes_dense_weights_again(kind):
    pull = jax.vjp(lambda a, x: output(kind, a, x), A, X)[1]
    saved = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull)]
    assert ((KERNEL.shape, jnp.float32) in saved) == (kind == "as_is"), saved
    if isinstance(frozen := stored(kind), Quantized):
        assert (frozen.codes.shape, frozen.codes.dtype) in saved


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bfloat16", "nf4"])
def test_value_and_gradient_are_those_of_dense_weights(kind):
    dense = low_rank(kind).dense()
    plain = lambda a, x: jnp.tanh(x @ dense) + 0.5 * (x @ a @ B)
    both = lambda f: jax.jit(jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), (0, 1)))(A, X)
    (value, found), (want, gradient) = both(lambda a, x: output(kind, a, x)), both(plain)
    assert_close(value, want, 1e-6)
    for one, other in zip(found, gradient, strict=True):
        assert_close(one, other, 1e-6)
