"""Losses that count hidden rows, or fail for a slice of hidden rows only."""

import jax.numpy as jnp
from planted import Planted, counted, errors, good, height, total

from jtrain.core.mean import Mean


def inverted(params, batch, rng):
    return Mean.of(errors(params, batch), ~batch["mask"])


def inverted_in_the_total(params, batch, rng):
    return Mean(jnp.where(batch["mask"], 0, errors(params, batch)).sum(), counted(batch))


def inverted_metric(params, batch, rng):
    return good(params, batch, rng), {"error": Mean.of(errors(params, batch), ~batch["mask"])}


def mean_times_count(params, batch, rng):
    """Return a mean that is right, but 0/0 for a slice without unmasked rows."""
    mean = total(params, batch) / counted(batch)
    return Mean(mean * counted(batch), counted(batch))


def metric_times_count(params, batch, rng):
    return good(params, batch, rng), {"error": mean_times_count(params, batch, rng)}


def gradient_of_none(params, batch, rng):
    """Return a mean that is 0 for an empty slice, with the gradient 0/0."""
    share = jnp.where(batch["mask"], errors(params, batch) / counted(batch), 0)
    return Mean(share.sum() * counted(batch), counted(batch))


def penalty_in_the_total(params, batch, rng):
    return Mean(total(params, batch) + jnp.square(params["slope"]).sum(), counted(batch))


def offset_of_a_metric(params, batch, rng):
    return good(params, batch, rng), {"error": Mean(total(params, batch) + 1, counted(batch))}


def one_more_row(params, batch, rng):
    """Guard against division by zero by adding 1."""
    return Mean(total(params, batch), counted(batch) + 1)


def hidden_in_the_total(params, batch, rng):
    return Mean(errors(params, batch).sum(), counted(batch))


def hidden_in_the_weight(params, batch, rng):
    return Mean(total(params, batch), jnp.ones_like(batch["y"]).sum())


def hidden_in_a_term(params, batch, rng):
    penalty = Mean(jnp.square(height(params, batch)).sum(), counted(batch))
    return good(params, batch, rng) + 0.1 * penalty


def mean_over_all_times_count(params, batch, rng):
    """Multiply the mean over all rows, hidden rows as zeros, by the number of unmasked rows."""
    values = jnp.where(batch["mask"], errors(params, batch), 0)
    return Mean(values.mean() * counted(batch), counted(batch))


def only_full_batches(params, batch, rng):
    return Mean(jnp.where(batch["mask"].all(), total(params, batch), 0), counted(batch))


def up_to_the_last_row(params, batch, rng):
    """Count all rows up to the last unmasked row, including hidden rows between them."""
    rows = jnp.arange(len(batch["mask"]))
    last = jnp.where(batch["mask"], rows, -1).max()
    return Mean.of(errors(params, batch), rows <= last)


FAULTS = {
    "the mask is inverted": Planted(inverted, "inverted mask", "the mask is inverted"),
    "the mask is inverted in the total": Planted(inverted_in_the_total, "inverted mask"),
    "the mask of a metric is inverted": Planted(
        inverted_metric, "inverted mask", "the metric 'error'"
    ),
    "0/0 in an empty slice": Planted(mean_times_count, "empty slice", "0/0"),
    "0/0 in an empty slice of a metric": Planted(
        metric_times_count, "empty slice", "the metric 'error'"
    ),
    "the gradient of an empty slice": Planted(gradient_of_none, "empty slice", "the gradient"),
    "a penalty in the total": Planted(penalty_in_the_total, "constant in each slice"),
    "a constant in a metric": Planted(
        offset_of_a_metric, "constant in each slice", "the metric 'error'"
    ),
    "one row too many is counted": Planted(one_more_row, "constant in each slice"),
    "hidden rows in the total": Planted(hidden_in_the_total, "hidden rows"),
    "hidden rows in the weight": Planted(hidden_in_the_weight, "padded size"),
    "hidden rows in the second term": Planted(hidden_in_a_term, "hidden rows", "term 1"),
    "a mean over all rows times the number of unmasked rows": Planted(
        mean_over_all_times_count, "padded size"
    ),
    "zero for a batch that is not full": Planted(only_full_batches, "padded size"),
    "hidden rows before the last": Planted(up_to_the_last_row, "hidden rows"),
}
