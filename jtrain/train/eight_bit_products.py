"""Numbers of 8 bits (e4m3, e5m2, with a scale for each slice), and products of them."""

import functools
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

Scaling: TypeAlias = Literal["rows", "tensor"]
Dims: TypeAlias = tuple[int, ...]


class Contraction(NamedTuple):
    """The dims of a product that are summed: of `x`, and those of the weight in the same order."""

    x: Dims
    w: Dims


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fp8_product(
    x: Float[Array, "..."], w: Float[Array, "..."], dims: Contraction, scaling: Scaling
) -> Float[Array, "..."]:
    """Return the product of `x` and `w`, its free dims those of `x`, then those of `w`.

    Forward both factors are e4m3, and backward the incoming gradient is e5m2; sums are in float32,
    and the result has the type of the factors. Only reverse mode.

    Args:
        dims: of each factor that are summed.
        scaling: `rows` scales each row of `x` and each column of `w` by itself, and computes the
            gradient of `w` from numbers that are not quantized, so that no row of a batch changes
            the rounding of another. `tensor` scales each array as a whole, and computes all three
            products in fp8.

    Sources: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; `rows` is torchao's recipe
    `rowwise_with_gw_hp`, https://github.com/pytorch/ao/tree/main/torchao/float8.
    """
    return _forward(x, w, dims, scaling)[0]


def _forward(x, w, dims, scaling):
    by_tensor = scaling == "tensor"
    left = quantize_fp8(x, E4M3, None if by_tensor else dims.x)
    right = quantize_fp8(w, E4M3, None if by_tensor else dims.w)
    y = _scaled_product(left, right, dims, jnp.result_type(x, w))
    # Empty arrays carry the types of the factors, which are those of their gradients.
    types = jnp.zeros(0, x.dtype), jnp.zeros(0, w.dtype)
    return y, ((left, right, *types) if by_tensor else (x, w, *types))


def _backward(dims, scaling, saved, grad):
    x, w, like_x, like_w = saved
    by_tensor = scaling == "tensor"
    shape_x, shape_w = (v.values.shape if by_tensor else v.shape for v in (x, w))
    free_x, free_w = _free(shape_x, dims.x), _free(shape_w, dims.w)
    of_w = tuple(range(len(free_x), grad.ndim))  # dims of the gradient
    of_x = tuple(range(len(free_x)))
    g = quantize_fp8(grad, E5M2, None if by_tensor else of_w)
    columns = w if by_tensor else quantize_fp8(w, E4M3, free_w)
    dx = _scaled_product(g, columns, Contraction(of_w, free_w), like_x.dtype)
    if by_tensor:
        dw = _scaled_product(x, g, Contraction(free_x, of_x), like_w.dtype)
    else:
        dw = _product(x, grad, Contraction(free_x, of_x), grad.dtype)
    dx = jnp.transpose(dx, _places_of_x(free_x, dims))
    dw = jnp.transpose(dw, _places_of_w(free_w, dims))
    return dx.astype(like_x.dtype), dw.astype(like_w.dtype)


fp8_product.defvjp(_forward, _backward)


class Quantized(NamedTuple):
    """An array of 8 bits and its scale: `values * scale` is near the original."""

    values: Shaped[Array, "..."]
    scale: Float[Array, "..."]  # float32: a scalar, or with size 1 in the dims that share a scale


def _scaled_product(left: Quantized, right: Quantized, dims: Contraction, dtype: Any) -> Array:
    """Return the product of two fp8 arrays in a type.

    The scales are applied to the sums: XLA then gives a product of two fp8 arrays to the tensor
    cores. `highest` asks cuBLASLt for sums in float32; by default those of fp8 are shorter.
    """
    if left.scale.ndim == 0 == right.scale.ndim:
        # One scalar after a product is an argument of cuBLASLt's, which then writes the narrow type
        # itself. A power of two rounds nothing, before or after the sums are rounded. Scaled
        # factors in place of the sums are a product in bfloat16 where XLA uses Triton.
        wide = jnp.promote_types(dtype, jnp.bfloat16)  # float16 would not hold the sums
        y = _product(left.values, right.values, dims, wide)
        return (y * (left.scale * right.scale).astype(wide)).astype(dtype)
    y = _product(left.values, right.values, dims, jnp.float32)
    # By halves: one scale may be 2^120 where the other is 2^-120.
    (rows, more_rows), (columns, more_columns) = (halves(s) for s in _spread(left, right, dims))
    return (y * rows * columns * more_rows * more_columns).astype(dtype)


def _product(left: Array, right: Array, dims: Contraction, dtype: Any) -> Array:
    return jax.lax.dot_general(
        left, right, ((dims.x, dims.w), ((), ())), precision="highest", preferred_element_type=dtype
    )


def _spread(left: Quantized, right: Quantized, dims: Contraction) -> tuple[Array, Array]:
    free_left = [left.scale.shape[i] for i in _free(left.scale.shape, dims.x)]
    free_right = [right.scale.shape[i] for i in _free(right.scale.shape, dims.w)]
    return (
        left.scale.reshape(*free_left, *[1] * len(free_right)),
        right.scale.reshape(*[1] * len(free_left), *free_right),
    )


def _free(shape: tuple[int, ...], summed: Dims) -> Dims:
    return tuple(i for i in range(len(shape)) if i not in summed)


def _places_of_x(free_x: Dims, dims: Contraction) -> Dims:
    """Return where each dim of `x` is in a product of (free of x ..., summed, in w's order)."""
    order = sorted(dims.w)
    place = {i: n for n, i in enumerate(free_x)}
    place |= {i: len(free_x) + order.index(j) for i, j in zip(*dims, strict=True)}
    return tuple(place[i] for i in range(len(place)))


def _places_of_w(free_w: Dims, dims: Contraction) -> Dims:
    """Return where each dim of `w` is in a product of (summed, in x's order, free of w ...)."""
    order = sorted(dims.x)
    place = {j: len(order) + n for n, j in enumerate(free_w)}
    place |= {j: order.index(i) for i, j in zip(*dims, strict=True)}
    return tuple(place[j] for j in range(len(place)))


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantize_fp8(x: Float[Array, "..."], dtype: Any, dims: tuple[int, ...] | None) -> Quantized:
    """Round `x` to an fp8 type, scaled so that the largest number just fits.

    The scale is a power of two, so that the scaling itself rounds nothing. A slice of zeros has the
    scale 1. In a slice with NaN or infinity e4m3 makes NaN of both, and e5m2 keeps both.

    Args:
        dims: that share one scale; None: all, and the scale is a scalar.

    Source: the types of Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, table 1.
    """
    wide = x.astype(jnp.float32)
    exponent = _fitting_exponent(_largest(wide, dims), dtype)
    values = (wide * _power_of_two(exponent)).astype(dtype)
    return Quantized(values, _power_of_two(-exponent))


def halves(scale: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return two powers of two near the root of a power of two, whose product it is."""
    exponent = (jax.lax.bitcast_convert_type(scale, jnp.int32) >> 23) - 127
    return _power_of_two(exponent >> 1), _power_of_two(exponent - (exponent >> 1))


def _largest(x: Float[Array, "..."], dims: tuple[int, ...] | None) -> Float[Array, "..."]:
    return jnp.max(jnp.abs(x), axis=dims, keepdims=dims is not None)


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
