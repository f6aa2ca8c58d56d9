"""Losses with one fault each, paired with the corrected loss."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from line import height, line, points

from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.core.rows import first_key, row_keys


class Fault(NamedTuple):
    """A faulty and a corrected loss, with the cause that a check must report."""

    wrong: dict[str, Any]  # arguments of assert_invariant
    right: dict[str, Any]
    cause: str
    message: str  # words of the explanation


def errors(params, batch):
    return jnp.square(height(params, batch) - batch["y"])  # b


def counted(batch):
    return batch["mask"].sum(dtype=jnp.float32)


def good(params, batch, rng):
    return Mean.of(errors(params, batch), batch["mask"])


def total(params, batch):
    return jnp.where(batch["mask"], errors(params, batch), 0).sum()


def mean_of_means(params, batch, rng):
    return Mean(total(params, batch) / jnp.maximum(counted(batch), 1), jnp.float32(1))


def padded_rows_counted(params, batch, rng):
    return Mean(errors(params, batch).sum(), counted(batch))


def divided_by_padded_size(params, batch, rng):
    return Mean(total(params, batch), jnp.float32(len(batch["mask"])))


def normalized(params, batch, mask):
    """Subtract from the heights their mean over the rows where `mask` is true."""
    y = height(params, batch)
    return y - jnp.where(mask, y, 0).sum() / jnp.maximum(mask.sum(), 1)


def batch_norm(params, batch, rng):
    y = normalized(params, batch, batch["mask"])
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def batch_norm_over_hidden_rows(params, batch, rng):
    y = normalized(params, batch, jnp.ones_like(batch["mask"]))
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def layer_norm(params, batch, rng):
    x = batch["x"] - batch["x"].mean(1, keepdims=True)
    return good(params, batch | {"x": x}, rng)


def dropped(params, batch, rng, draw):
    """Return the loss with the inputs that the mask `draw(rng)`, b 3, selects."""
    if rng is None:
        return good(params, batch, None)
    return good(params, batch | {"x": jnp.where(draw(rng), batch["x"], 0)}, rng)


def by_key(keys):
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (3,)))(keys)


def dropout(params, batch, rng):
    return dropped(params, batch, rng, lambda rng: by_key(row_keys(rng, batch)))


def dropout_of_the_position(params, batch, rng):
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return dropped(params, batch, rng, lambda rng: by_key(fold(rng, jnp.arange(len(batch["row"])))))


def dropout_without_row_keys(params, batch, rng):
    return dropped(params, batch, rng, lambda rng: jax.random.bernoulli(rng, 0.5, batch["x"].shape))


def dropout_of_a_neighbour(params, batch, rng):
    return dropped(params, batch, rng, lambda rng: by_key(jnp.roll(row_keys(rng, batch), 1)))


def foreign_dropout(params, batch, rng):
    """Draw one mask by the key of the first row, as layers of other libraries do."""

    def draw(rng):
        return jax.random.bernoulli(first_key(row_keys(rng, batch)), 0.5, batch["x"].shape)

    return dropped(params, batch, rng, draw)


def with_accuracy(hits):
    """Return a loss with the metric `hits(good rows, batch)`."""

    def loss(params, batch, rng):
        right = (errors(params, batch) < 1).astype(jnp.float32)
        return good(params, batch, rng), {"accuracy": hits(right, batch)}

    return loss


accuracy = with_accuracy(lambda right, batch: Mean.of(right, batch["mask"]))
accuracy_of_hidden_rows = with_accuracy(lambda right, batch: Mean(right.sum(), counted(batch)))
accuracy_of_means = with_accuracy(
    lambda right, batch: Mean(
        jnp.where(batch["mask"], right, 0).sum() / jnp.maximum(counted(batch), 1), jnp.float32(1)
    )
)


def hardest_rows(params, batch, rng):
    """Return the mean over the worse half of the rows."""
    worst = jax.lax.top_k(
        jnp.where(batch["mask"], errors(params, batch), 0), len(batch["row"]) // 2
    )
    return Mean(worst[0].sum(), counted(batch))


def hardest_numbers(params, batch, rng):
    """Return the mean of the worst number of each row."""
    off = jnp.square(batch["x"] * params["slope"][None] - params["offset"])
    return Mean.of(jax.lax.top_k(off, 1)[0][:, 0], batch["mask"])


def expert_capacity(params, batch, rng):
    """Route rows to two experts, each with a capacity of half of the slice, in order."""
    chosen = jax.nn.one_hot((batch["x"][:, 0] > 0.4).astype(jnp.int32), 2) * batch["mask"][:, None]
    position = (jnp.cumsum(chosen, 0) * chosen).sum(1)
    served = position <= len(batch["row"]) / 4
    return Mean.of(jnp.where(served, errors(params, batch), 0), batch["mask"])


def expert_capacity_of_a_row(params, batch, rng):
    """Apply the capacity to the numbers within a row."""
    position = jnp.cumsum(batch["x"] > 0, 1)
    x = jnp.where(position <= 2, batch["x"], 0)
    return good(params, batch | {"x": x}, rng)


def weighted_by_position(params, batch, rng):
    position = jnp.arange(len(batch["row"]), dtype=jnp.float32)
    return Mean.of(errors(params, batch) * position, batch["mask"])


def weighted_by_row(params, batch, rng):
    return Mean.of(errors(params, batch) * batch["row"].astype(jnp.float32), batch["mask"])


def auxiliary(params, batch):
    return Mean.of(jnp.square(height(params, batch)), batch["mask"])


def coefficient_of_rows(params, batch, rng):
    return good(params, batch, rng) + 0.01 * len(batch["row"]) * auxiliary(params, batch)


def coefficient(params, batch, rng):
    return good(params, batch, rng) + 0.08 * auxiliary(params, batch)


_DRAW = np.random.default_rng(0)


def numpy_draws(params, batch, rng):
    x = batch["x"] * np.float32(_DRAW.uniform(0.5, 1))
    return good(params, batch | {"x": x}, rng)


def tracing(params, batch, rng):
    """Return another loss under tracing."""
    traced = isinstance(batch["x"] + 1, jax.core.Tracer)
    return good(params, batch | {"x": batch["x"] * (2 if traced else 1)}, rng)


@jax.custom_vjp
def _centred(x):
    return x


_centred.defvjp(lambda x: (x, None), lambda _, up: (up - up.mean(),))


def gradient_of_the_batch(params, batch, rng):
    y = _centred(height(params, batch))
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def scaled_by_devices(params, batch, rng):
    return jax.device_count() * good(params, batch, rng)


def shifted_by_the_process(params, batch, rng):
    return Mean.of(errors(params, batch) + os.getpid() % 7, batch["mask"])


def groups_of_four(params, batch, rng):
    rows = len(batch["mask"]) // 4 * 4
    return Mean.of(errors(params, batch)[:rows], batch["mask"][:rows])


def weighted_by_the_last_row(params, batch, rng):
    return Mean.of(errors(params, batch) * batch["row"] / batch["row"].max(), batch["mask"])


def largest_target(params, batch, rng):
    largest = Mean(jnp.where(batch["mask"], batch["y"], -9).max(), jnp.float32(1))
    return good(params, batch, rng), {"largest": largest}


def mean_target_of_a_slice(params, batch, rng):
    mean = jnp.where(batch["mask"], batch["y"], 0).sum() / jnp.maximum(counted(batch), 1)
    return good(params, batch, rng), {"mean": Mean(mean, jnp.float32(1))}


def targets(params, batch, rng):
    return good(params, batch, rng), {"mean": Mean.of(batch["y"], batch["mask"])}


@stateful
def any_above_0(params, extra, batch, rng):
    found = jnp.any((batch["y"] > 0) & batch["mask"]).astype(jnp.float32)
    return good(params, batch, rng), {}, {"above": Mean(found, jnp.float32(1))}


@stateful
def share_above_0(params, extra, batch, rng):
    found = (batch["y"] > 0).astype(jnp.float32)
    return good(params, batch, rng), {}, {"above": Mean.of(found, batch["mask"])}


def _arguments(loss, **more):
    return {"loss": loss, "params": line(), "batch": points(8), **more}


def _fault(wrong, right, cause, message, **more):
    return Fault(_arguments(wrong, **more), _arguments(right, **more), cause, message)


FAULTS = {
    "mean of means": _fault(mean_of_means, good, "mean of means", "weights 1, 1 for two halves"),
    "padded rows counted": _fault(
        padded_rows_counted, good, "hidden rows", "the contents of hidden rows are counted"
    ),
    "gradient divided by the padded size": _fault(
        divided_by_padded_size,
        good,
        "padded size",
        "it is divided by the size of an array",
    ),
    "batch norm on a shard": _fault(
        batch_norm, layer_norm, "batch statistic", "faults_of_losses.py:"
    ),
    "batch norm over hidden rows": _fault(
        batch_norm_over_hidden_rows,
        batch_norm,
        "hidden rows in a statistic",
        "a statistic over rows that includes them",
        couples="batch",
    ),
    "dropout from the position": _fault(
        dropout_of_the_position, dropout, "key of the position", "jt.row_keys(rng, batch)"
    ),
    "row_keys not used": _fault(
        dropout_without_row_keys, dropout, "key of the position", "does not come from `row`"
    ),
    "dropout from a neighbour": _fault(
        dropout_of_a_neighbour, dropout, "key of other rows", "each key for its own row only"
    ),
    "mask ignored in a metric": _fault(
        accuracy_of_hidden_rows, accuracy, "hidden rows", "the metric 'accuracy'"
    ),
    "metric as a mean of means": _fault(
        accuracy_of_means, accuracy, "mean of means", "the metric 'accuracy' has the weights 1, 1"
    ),
    "top-k by shard": _fault(hardest_rows, hardest_numbers, "rows are ranked", "top_k over rows"),
    "expert capacity by shard": _fault(
        expert_capacity, expert_capacity_of_a_row, "rows are ranked", "cumsum over rows"
    ),
    "weights from the position": _fault(
        weighted_by_position, weighted_by_row, "position", "`batch['row']`"
    ),
    "auxiliary loss scaled by the rows of a slice": _fault(
        coefficient_of_rows, coefficient, "coefficient of rows", "0.08 for all rows and 0.04, 0.04"
    ),
    "draws from numpy": _fault(
        numpy_draws, good, "not a function", "draws from a source other than its key"
    ),
    "another program under jit": _fault(
        tracing, good, "another program under jit", "when it is traced"
    ),
    "the number of devices": _fault(
        scaled_by_devices, good, "numbers of the host", "jax.device_count()"
    ),
    "the number of the process": _fault(
        shifted_by_the_process, good, "numbers of the host", "os.getpid()"
    ),
    "rows in groups of four": _fault(groups_of_four, good, "rows dropped", "leaves out row"),
    "numbers of other rows": _fault(
        weighted_by_the_last_row, good, "row numbers", "`batch['row']`"
    ),
    "a metric without parameters": _fault(
        largest_target, targets, "function of a sum", "reduce_max over rows"
    ),
    "a metric without parameters, of means": _fault(
        mean_target_of_a_slice, targets, "mean of means", "the metric 'mean'"
    ),
    "whether any row is positive": _fault(
        any_above_0,
        share_above_0,
        "function of a sum",
        "the leaf 'above' of extra",
        extra={"above": jnp.float32(0)},
    ),
    "a derivative over the batch": _fault(gradient_of_the_batch, good, "gradient", "custom_vjp"),
}
