"""Losses that overflow, round in narrow types or are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
from planted import Planted, counted, errors, good, points

from jtrain.core.mean import Mean

HALF, BRAIN = jnp.float16, jnp.bfloat16


def hidden_as_zero(params, batch):
    return jnp.where(batch["mask"], errors(params, batch), 0)


def in_float16(scale):
    """Return a loss that sums scaled errors in float16."""

    def loss(params, batch, rng):
        values = (scale * hidden_as_zero(params, batch)).astype(HALF)
        return Mean(values.sum().astype(jnp.float32), scale * counted(batch))

    return loss


def float16_by_turns(params, batch, rng):
    add = lambda sum_, x: (sum_ + x, None)
    values = hidden_as_zero(params, batch).astype(HALF)
    return Mean(jax.lax.scan(add, HALF(0), values)[0].astype(jnp.float32), counted(batch))


def bfloat16_sum(params, batch, rng):
    values = hidden_as_zero(params, batch).astype(BRAIN)
    return Mean(values.sum().astype(jnp.float32), counted(batch))


def rounded_afterwards(params, batch, rng):
    total = hidden_as_zero(params, batch).sum()
    return Mean(total.astype(HALF).astype(jnp.float32), counted(batch))


def count_in_bfloat16(params, batch, rng):
    """Count rows in bfloat16, which is exact up to 256."""
    return Mean(hidden_as_zero(params, batch).sum(), batch["mask"].astype(BRAIN).sum())


def metric_in_bfloat16(params, batch, rng):
    values = hidden_as_zero(params, batch).astype(BRAIN)
    return good(params, batch, rng), {"error": Mean(values.sum(), counted(batch))}


def float16_weights(params, batch, rng):
    weights = jnp.where(batch["mask"], batch["weight"], 0).astype(HALF)
    total = (errors(params, batch) * weights.astype(jnp.float32)).sum()
    return Mean(total, weights.sum().astype(jnp.float32))


def weights_of_type(dtype):
    """Return a loss that sums its weights in `dtype`."""

    def loss(params, batch, rng):
        weights = jnp.where(batch["mask"], batch["weight"], 0).astype(dtype)
        total = (errors(params, batch) * weights).sum()
        return Mean(total, weights.sum(dtype=dtype).astype(jnp.float32))

    return loss


def product_of_int8(params, batch, rng):
    """Sum the weights as a product with the mask, in int8."""
    weight = batch["weight"].astype(jnp.int8) @ batch["mask"].astype(jnp.int8)
    total = (errors(params, batch) * jnp.where(batch["mask"], batch["weight"], 0)).sum()
    return Mean(total, weight.astype(jnp.float32))


def squares_in_int32(params, batch, rng):
    squares = jnp.where(batch["mask"], batch["weight"], 0).astype(jnp.int32) ** 2
    total = (errors(params, batch) * squares).sum()
    return Mean(total, squares.sum().astype(jnp.float32))


def overflows_float32(params, batch, rng):
    return Mean.of(jnp.exp(100 + errors(params, batch)), batch["mask"])


def logarithm_of_zero(params, batch, rng):
    return Mean.of(jnp.log(errors(params, batch) * 0), batch["mask"])


def not_a_number(params, batch, rng):
    return Mean.of(errors(params, batch) / (batch["y"] - batch["y"]), batch["mask"])


def norm_at_zero(params, batch, rng):
    """Return a finite loss whose gradient is not finite: a norm at zero."""
    off = jnp.sqrt(jnp.square((params["slope"] - params["slope"])[None] * batch["x"]).sum(1))
    return Mean.of(errors(params, batch) + off, batch["mask"])


def infinite_metric(params, batch, rng):
    far = jnp.exp(1e3 + errors(params, batch))
    return good(params, batch, rng), {"far": Mean.of(far, batch["mask"])}


def weighing(*weights):
    return {"batch": {**points(8), "weight": np.asarray(weights)}}


SMALL = {"batch": {**points(8), "y": np.linspace(100, 105, 8).astype("f")}}

FAULTS = {
    "a float16 sum overflows": Planted(in_float16(1.0), "overflow", "float16", SMALL),
    "a float16 sum rounds": Planted(in_float16(1.0), "narrow sum", "float16"),
    "a float16 sum by turns of a loop": Planted(float16_by_turns, "narrow sum", "float16"),
    "a bfloat16 sum": Planted(bfloat16_sum, "narrow sum", "bfloat16"),
    "a sum that is rounded to float16": Planted(rounded_afterwards, "narrow sum", "float16"),
    "rows are counted in bfloat16": Planted(count_in_bfloat16, "narrow sum", "bfloat16"),
    "a metric is summed in bfloat16": Planted(metric_in_bfloat16, "narrow sum", "metric 'error'"),
    "float16 weights overflow": Planted(
        float16_weights, "overflow", "float16", weighing(*[2e4] * 8)
    ),
    "int8 weights overflow": Planted(
        weights_of_type(jnp.int8), "overflow", "int8", weighing(*range(40, 48))
    ),
    "int16 weights overflow": Planted(
        weights_of_type(jnp.int16), "overflow", "int16", weighing(*range(9000, 9008))
    ),
    "uint8 weights overflow": Planted(
        weights_of_type(jnp.uint8), "overflow", "uint8", weighing(*range(80, 88))
    ),
    "an int8 product overflows": Planted(
        product_of_int8, "overflow", "int8", weighing(*range(40, 48))
    ),
    "squares overflow int32": Planted(
        squares_in_int32, "overflow", "int32", weighing(*range(30_000, 30_008))
    ),
    "float32 overflows": Planted(overflows_float32, "not finite", "exp"),
    "the logarithm of zero": Planted(logarithm_of_zero, "not finite", "log"),
    "zero by zero": Planted(not_a_number, "not finite", "div"),
    "the gradient of a norm at zero": Planted(norm_at_zero, "not finite", "gradient"),
    "a metric that is infinite": Planted(infinite_metric, "not finite", "metric 'far'"),
}
