"""Numbers of 8 bits: rounding to e4m3, e5m2 and int8 with a scale for each slice of an array."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
INT8_LARGEST = 127


class Quantized(NamedTuple):
    """An array of 8 bits and its scale: `values * scale` is near the original."""

    values: Shaped[Array, "..."]
    scale: Float[Array, "..."]  # float32, with size 1 in the dims that share a scale


def quantize_fp8(x: Float[Array, "..."], dtype: Any, dims: tuple[int, ...] | None) -> Quantized:
    """Round `x` to an fp8 type, scaled so that the largest number just fits.

    The scale is a power of two, so that the scaling itself rounds nothing. A slice of zeros has the
    scale 1. In a slice with NaN or infinity e4m3 makes NaN of both, and e5m2 keeps both.

    Args:
        dims: that share one scale; None: all, one scale for the whole array.

    Source: the types of Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, table 1.
    """
    wide = x.astype(jnp.float32)
    exponent = _fitting_exponent(_largest(wide, dims), dtype)
    values = (wide * _power_of_two(exponent)).astype(dtype)
    return Quantized(values, _power_of_two(-exponent))


def quantize_int8(x: Float[Array, "..."], dims: tuple[int, ...] | None) -> Quantized:
    """Round `x` to int8 of -127 .. 127; ties go to even. `dims` as in `quantize_fp8`.

    int8 has no NaN: a slice with NaN or infinity has a scale that is NaN or infinite.
    """
    wide = x.astype(jnp.float32)
    largest = _largest(wide, dims)
    scale = jnp.where(largest == 0, 1, largest / INT8_LARGEST)
    return Quantized(jnp.round(wide / scale).astype(jnp.int8), scale)


def halves(scale: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return two powers of two near the root of a power of two, whose product it is."""
    exponent = (jax.lax.bitcast_convert_type(scale, jnp.int32) >> 23) - 127
    return _power_of_two(exponent >> 1), _power_of_two(exponent - (exponent >> 1))


def _largest(x: Float[Array, "..."], dims: tuple[int, ...] | None) -> Float[Array, "..."]:
    return jnp.max(jnp.abs(x), axis=dims, keepdims=True)


def _fitting_exponent(largest: Float[Array, "..."], dtype: Any) -> Shaped[Array, "..."]:
    """Return the largest k with `largest * 2**k` at most the type's maximum, within -126 .. 126.

    By the bits of float32, as a logarithm is off by one at some powers of two.
    """
    top = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent, fraction = (bits >> 23) - 127, bits & 0x7FFFFF
    # 448 = 1.75 x 2^8 and 57344 = 1.75 x 2^15: a larger fraction needs one power less.
    top_bits = jax.lax.bitcast_convert_type(jnp.float32(top.max), jnp.int32)
    top_exponent, top_fraction = (top_bits >> 23) - 127, top_bits & 0x7FFFFF
    fitting = top_exponent - exponent - (fraction > top_fraction)
    usable = jnp.isfinite(largest) & (largest > 0)
    return jnp.where(usable, jnp.clip(fitting, -126, 126), 0)


def _power_of_two(exponent: Shaped[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
