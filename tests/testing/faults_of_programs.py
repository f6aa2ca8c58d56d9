"""Losses that break the contract: wrong returns, changed arguments, fixed sizes and bad indices."""

import jax
import jax.numpy as jnp
import numpy as np
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
    total,
)

from jtrain.core.mean import Mean
from jtrain.losses.cross_entropy import cross_entropy


def changes_its_batch(params, batch, rng):
    batch["x"] = batch["x"] * 2
    return good(params, batch, rng)


def takes_from_its_batch(params, batch, rng):
    y = batch.pop("y")
    return good(params, {**batch, "y": y}, rng)


def changes_its_parameters(params, batch, rng):
    params["slope"] = params["slope"] * 2
    return good(params, batch, rng)


def fixed_reshape(params, batch, rng):
    pairs = errors(params, batch).reshape(4, 2)
    return Mean.of(pairs.reshape(-1), batch["mask"])


def fixed_constant(params, batch, rng):
    return Mean.of(errors(params, batch) * jnp.ones(8), batch["mask"])


def mean_of_means(params, batch, rng):
    return Mean(total(params, batch) / jnp.maximum(counted(batch), 1), jnp.float32(1))


def mean_of_tokens(params, batch, rng):
    """Return the mean over the tokens of a slice, as if all slices had as many tokens."""
    visible = (jnp.arange(3)[None] < batch["length"][:, None]) & batch["mask"][:, None]
    values = jnp.square(batch["x"] * params["slope"][None] - params["offset"])
    return Mean(jnp.where(visible, values, 0).sum() / jnp.maximum(visible.sum(), 1), jnp.float32(1))


def mean_of_tokens_by_rows(params, batch, rng):
    return Mean(mean_of_tokens(params, batch, rng).total * counted(batch), counted(batch))


def scalar_mean_of_tokens(params, batch, rng):
    return mean_of_tokens(params, batch, rng).total


def scalar_sum(params, batch, rng):
    return errors(params, batch).sum()


def fixed_weight(params, batch, rng):
    return Mean(total(params, batch), jnp.float32(8))


def weight_of_a_global_batch(params, batch, rng):
    return Mean(total(params, batch) / 8, jnp.float32(1))


def running_mean_of_means(params, batch, rng):
    off = {"error": mean_of_means(params, batch, rng)}
    return good(params, batch, rng), off


def coefficient_of_labels(params, batch, rng):
    share = batch["y"].mean()
    return good(params, batch, rng) + share * Mean.of(jnp.abs(errors(params, batch)), batch["mask"])


def one_hot_labels(params, batch, rng):
    one_hot = jax.nn.one_hot(batch["label"], CLASSES)
    return Mean.of(-(one_hot * jax.nn.log_softmax(logits(params, batch))).sum(1), batch["mask"])


def indexed_labels(params, batch, rng):
    chances = jax.nn.log_softmax(logits(params, batch))
    return Mean.of(-chances[jnp.arange(len(chances)), batch["label"]], batch["mask"])


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
FAULTS = {
    "the batch is changed": Planted(changes_its_batch, "changes its arguments", "batch['x']"),
    "a leaf is taken out of the batch": Planted(
        takes_from_its_batch, "changes its arguments", "'y'"
    ),
    "the parameters are changed": Planted(changes_its_parameters, "changes its arguments", "slope"),
    "a reshape for 8 rows": Planted(
        fixed_reshape, "fixed number of rows", "faults_of_programs.py:"
    ),
    "a constant for 8 rows": Planted(
        fixed_constant, "fixed number of rows", "faults_of_programs.py:"
    ),
    "a mean of means": Planted(mean_of_means, "mean of means"),
    "a mean of means of tokens": Planted(mean_of_tokens, "mean of means", "", LONG),
    "a mean of tokens, weighted by rows": Planted(
        mean_of_tokens_by_rows, "mean of means", "", LONG
    ),
    "a mean of tokens as a scalar": Planted(scalar_mean_of_tokens, "mean of means", "", LONG),
    "a sum as a plain scalar": Planted(scalar_sum, "sum as a mean", "mean over"),
    "a weight that is a constant": Planted(fixed_weight, "sum as a mean", "weight"),
    "a share of a global batch": Planted(weight_of_a_global_batch, "sum as a mean"),
    "a metric as a mean of means": Planted(running_mean_of_means, "mean of means", "the metric"),
    "a coefficient of the rows": Planted(coefficient_of_labels, "coefficient of rows"),
    "a label too large": Planted(entropy, RANGE, "'label'", LATE),
    "a label too large, by one_hot": Planted(one_hot_labels, RANGE, "'label'", LATE),
    "a label too large, by an index": Planted(indexed_labels, RANGE, "'label'", LATE),
    "a label too large, by jtrain's cross entropy": Planted(house_entropy, RANGE, "'label'", LATE),
    "a negative label": Planted(entropy, RANGE, "-1", labelled(0, 1, 2, 3, 0, -1, 1, 3)),
    "labels that start at 1": Planted(house_entropy, RANGE, "", labelled(1, 2, 3, 4, 1, 2, 3, 4)),
    "labels from 0, less one": Planted(from_one, RANGE, "", labelled(0, 1, 2, 3, 0, 1, 2, 3)),
    "a token outside of the table": Planted(embedded, RANGE, "'token'", TOKENS),
}


def as_a_number(params, batch, rng):
    scale = float(errors(params, batch).mean())
    return good(params, batch | {"x": batch["x"] / scale}, rng)


def asks_a_value(params, batch, rng):
    if errors(params, batch).sum() > 3:
        return good(params, batch, rng)
    return good(params, batch | {"x": batch["x"] / 2}, rng)


def as_numpy(params, batch, rng):
    return Mean.of(jnp.asarray(np.abs(np.asarray(errors(params, batch)))), batch["mask"])


def over_an_axis(params, batch, rng):
    return jax.lax.pmean(errors(params, batch).mean(), "data")


def another_name(params, batch, rng):
    return Mean.of(jnp.square(batch["inputs"] @ params["slope"]), batch["mask"])


def other_shapes(params, batch, rng):
    return Mean.of(params["slope"] @ batch["x"] - batch["y"], batch["mask"])


# Losses that cannot be traced, with words of the error.
UNTRACEABLE = {
    "float() of an array": (as_a_number, "Python number (float"),
    "if of an array": (asks_a_value, "jnp.where(condition, a, b)"),
    "numpy of an array": (as_numpy, "jnp.asarray(...) in the place of np.asarray(...)"),
    "a sum over an axis of the devices": (over_an_axis, "Leave that to the step"),
    "another name of a leaf": (another_name, "asks for 'inputs', and `batch` has x ("),
    "shapes that do not fit": (other_shapes, "(3,)"),
}
