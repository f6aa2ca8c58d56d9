"""Losses with wrong numbers, wrong returns, other programs, fixed sizes and bad indices."""

import jax
import jax.numpy as jnp
import numpy as np
from line import height
from planted import (
    CLASSES,
    Planted,
    classes,
    counted,
    entropy,
    errors,
    good,
    linear,
    logits,
    points,
    total,
)

from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.losses.cross_entropy import cross_entropy

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


def count_in_bfloat16(params, batch, rng):
    """Count rows in bfloat16, which is exact up to 256."""
    return Mean(hidden_as_zero(params, batch).sum(), batch["mask"].astype(BRAIN).sum())


def weights_of_type(dtype):
    """Return a loss that sums its weights in `dtype`."""

    def loss(params, batch, rng):
        weights = jnp.where(batch["mask"], batch["weight"], 0).astype(dtype)
        total = (errors(params, batch) * weights).sum()
        return Mean(total, weights.sum(dtype=dtype).astype(jnp.float32))

    return loss


def squares_in_int32(params, batch, rng):
    squares = jnp.where(batch["mask"], batch["weight"], 0).astype(jnp.int32) ** 2
    total = (errors(params, batch) * squares).sum()
    return Mean(total, squares.sum().astype(jnp.float32))


def overflows_float32(params, batch, rng):
    return Mean.of(jnp.exp(100 + errors(params, batch)), batch["mask"])


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

NUMBERS = {
    "a float16 sum overflows": Planted(in_float16(1.0), "overflow", "float16", SMALL),
    "a float16 sum rounds": Planted(in_float16(1.0), "narrow sum", "float16"),
    "a float16 sum by turns of a loop": Planted(float16_by_turns, "narrow sum", "float16"),
    "rows are counted in bfloat16": Planted(count_in_bfloat16, "narrow sum", "bfloat16"),
    "int8 weights overflow": Planted(
        weights_of_type(jnp.int8), "overflow", "int8", weighing(*range(40, 48))
    ),
    "squares overflow int32": Planted(
        squares_in_int32, "overflow", "int32", weighing(*range(30_000, 30_008))
    ),
    "float32 overflows": Planted(overflows_float32, "not finite", "exp"),
    "the gradient of a norm at zero": Planted(norm_at_zero, "not finite", "gradient"),
    "a metric that is infinite": Planted(infinite_metric, "not finite", "metric 'far'"),
}


def changes_its_batch(params, batch, rng):
    batch["x"] = batch["x"] * 2
    return good(params, batch, rng)


def fixed_reshape(params, batch, rng):
    pairs = errors(params, batch).reshape(4, 2)
    return Mean.of(pairs.reshape(-1), batch["mask"])


def mean_of_means(params, batch, rng):
    return Mean(total(params, batch) / jnp.maximum(counted(batch), 1), jnp.float32(1))


def mean_of_tokens(params, batch, rng):
    """Return the mean over the tokens of a slice, as if all slices had as many tokens."""
    visible = (jnp.arange(3)[None] < batch["length"][:, None]) & batch["mask"][:, None]
    values = jnp.square(batch["x"] * params["slope"][None] - params["offset"])
    return Mean(jnp.where(visible, values, 0).sum() / jnp.maximum(visible.sum(), 1), jnp.float32(1))


def mean_of_tokens_by_rows(params, batch, rng):
    return Mean(mean_of_tokens(params, batch, rng).total * counted(batch), counted(batch))


def scalar_sum(params, batch, rng):
    return errors(params, batch).sum()


def coefficient_of_labels(params, batch, rng):
    share = batch["y"].mean()
    return good(params, batch, rng) + share * Mean.of(jnp.abs(errors(params, batch)), batch["mask"])


def one_hot_labels(params, batch, rng):
    one_hot = jax.nn.one_hot(batch["label"], CLASSES)
    return Mean.of(-(one_hot * jax.nn.log_softmax(logits(params, batch))).sum(1), batch["mask"])


def house_entropy(params, batch, rng):
    return cross_entropy(logits(params, batch), batch["label"], batch["mask"])


def from_one(params, batch, rng):
    return entropy(params, batch | {"label": batch["label"] - 1}, rng)


def embedded(params, batch, rng):
    return Mean.of(jnp.square(params["table"][batch["token"]].sum(1) - batch["y"]), batch["mask"])


def labelled(*labels):
    return {"params": linear(), "batch": classes(label=np.asarray(labels, np.int32))}


LONG = {"batch": {**classes(), "length": np.arange(8, dtype=np.int32) % 3 + 1}}
TOKENS = {
    "params": {"table": jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)},
    "batch": classes(token=np.arange(8, dtype=np.int32)),
}
LATE = labelled(0, 1, 2, 3, 0, 1, 4, 3)
RANGE = "index out of range"
PROGRAMS = {
    "the batch is changed": Planted(changes_its_batch, "changes its arguments", "batch['x']"),
    "a reshape for 8": Planted(fixed_reshape, "fixed number of rows", "faults_of_programs.py:"),
    "a mean of means": Planted(mean_of_means, "mean of means"),
    "tokens, weighted by rows": Planted(mean_of_tokens_by_rows, "mean of means", "", LONG),
    "a sum as a plain scalar": Planted(scalar_sum, "sum as a mean", "mean over"),
    "a coefficient of the rows": Planted(coefficient_of_labels, "coefficient of rows"),
    "a label too large": Planted(entropy, RANGE, "'label'", LATE),
    "a label too large, by one_hot": Planted(one_hot_labels, RANGE, "'label'", LATE),
    "a negative label": Planted(entropy, RANGE, "-1", labelled(0, 1, 2, 3, 0, -1, 1, 3)),
    "a token outside of the table": Planted(embedded, RANGE, "'token'", TOKENS),
}


def over_an_axis(params, batch, rng):
    return jax.lax.pmean(errors(params, batch).mean(), "data")


def normalized(params, batch, mask):
    """Subtract from the heights their mean over the rows where `mask` is true."""
    y = height(params, batch)
    return y - jnp.where(mask, y, 0).sum() / jnp.maximum(mask.sum(), 1)


def batch_norm_over_hidden_rows(params, batch, rng):
    y = normalized(params, batch, jnp.ones_like(batch["mask"]))
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def weighted_by_position(params, batch, rng):
    position = jnp.arange(len(batch["row"]), dtype=jnp.float32)
    return Mean.of(errors(params, batch) * position, batch["mask"])


def scaled_by_devices(params, batch, rng):
    return jax.device_count() * good(params, batch, rng)


def groups_of_four(params, batch, rng):
    rows = len(batch["mask"]) // 4 * 4
    return Mean.of(errors(params, batch)[:rows], batch["mask"][:rows])


@stateful
def any_above_0(params, extra, batch, rng):
    found = jnp.any((batch["y"] > 0) & batch["mask"]).astype(jnp.float32)
    return good(params, batch, rng), {}, {"above": Mean(found, jnp.float32(1))}


BATCH = {"rows_interact": "batch"}
PLACES = {
    "batch norm over hidden rows": Planted(batch_norm_over_hidden_rows,
        "hidden rows in a statistic", "a statistic over rows that includes them", BATCH),
    "weights from the position": Planted(weighted_by_position, "position", "`batch['row']`"),
    "devices": Planted(scaled_by_devices, "numbers of the host", "jax.device_count()"),
    "rows in groups of four": Planted(groups_of_four, "rows dropped", "leaves out row"),
    "whether any row is positive": Planted(any_above_0, "function of a sum",
        "the leaf 'above' of extra", {"extra": {"above": jnp.float32(0)}}),
}  # fmt: skip
