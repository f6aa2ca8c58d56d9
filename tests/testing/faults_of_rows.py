"""Losses that count hidden rows, or in which rows interact or are drawn together."""

import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from planted import CLASSES, CLASSIFIER, Planted, counted, errors, good, height, logits, nats, total

from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys
from jtrain.models.adapters import first_key, mean_of_slices
from jtrain.models.adapters.libraries import from_linen


def inverted(params, batch, rng):
    return Mean.of(errors(params, batch), ~batch["mask"])


def mean_times_count(params, batch, rng):
    """Return a mean that is right, but 0/0 for a slice without unmasked rows."""
    mean = total(params, batch) / counted(batch)
    return Mean(mean * counted(batch), counted(batch))


def gradient_of_none(params, batch, rng):
    """Return a mean that is 0 for an empty slice, with the gradient 0/0."""
    share = jnp.where(batch["mask"], errors(params, batch) / counted(batch), 0)
    return Mean(share.sum() * counted(batch), counted(batch))


def penalty_in_the_total(params, batch, rng):
    return Mean(total(params, batch) + jnp.square(params["slope"]).sum(), counted(batch))


def hidden_in_the_total(params, batch, rng):
    return Mean(errors(params, batch).sum(), counted(batch))


def hidden_in_the_weight(params, batch, rng):
    return Mean(total(params, batch), jnp.ones_like(batch["y"]).sum())


def hidden_in_a_term(params, batch, rng):
    penalty = Mean(jnp.square(height(params, batch)).sum(), counted(batch))
    return good(params, batch, rng) + 0.1 * penalty


MASKS = {
    "the mask is inverted": Planted(inverted, "inverted mask", "the mask is inverted"),
    "0/0 in an empty slice": Planted(mean_times_count, "empty slice", "0/0"),
    "the gradient of an empty slice": Planted(gradient_of_none, "empty slice", "the gradient"),
    "a penalty in the total": Planted(penalty_in_the_total, "constant in each slice"),
    "hidden rows in the total": Planted(hidden_in_the_total, "hidden rows"),
    "hidden rows in the weight": Planted(hidden_in_the_weight, "padded size"),
    "hidden rows in the second term": Planted(hidden_in_a_term, "hidden rows", "term 1"),
}


def meaned(values, mask):
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)


class Normed(nn.Module):
    """The batch norm model of docs/adapters.md."""

    @nn.compact
    def __call__(self, x, mask, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x), mask=mask[:, None])
        return nn.Dense(1)(x)[:, 0]


def with_model(model):
    """Return loss, parameters and extra of a model, in training mode if there is a key."""
    params, extra = model.init(jax.random.key(0))

    @stateful
    def loss(params, extra, batch, rng):
        inputs = batch["x"], batch["mask"]
        y, new = model.apply(params, extra, *inputs, rng=rng)
        mean = Mean.of(jnp.square(y - batch["y"]), batch["mask"])
        return mean, {}, mean_of_slices(extra, new, batch["mask"])

    return {"loss": loss, "params": params, "extra": extra}


def of_model(model, cause, message=""):
    given = with_model(model)
    return Planted(given.pop("loss"), cause, message, given)


def centred_in_training(params, batch, rng):
    y = height(params, batch)
    if rng is not None:
        y = y - meaned(y, batch["mask"])
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def softmax_over_rows(params, batch, rng):
    """Take the softmax along the wrong axis."""
    scores = jnp.where(batch["mask"][:, None], logits(params, batch), -1e9)
    chances = jax.nn.log_softmax(scores, axis=0)
    at_label = jnp.take_along_axis(chances, batch["label"][:, None], 1)[:, 0]
    return Mean.of(-at_label, batch["mask"])


def contrastive(params, batch, rng):
    one, other = logits(params, batch), batch["x"] @ params["kernel"][::-1]
    scores = jnp.where(batch["mask"][None], one @ other.T, -1e9)
    return Mean.of(-jnp.diag(jax.nn.log_softmax(scores)), batch["mask"])


def frequencies(batch):
    return (jax.nn.one_hot(batch["label"], CLASSES) * batch["mask"][:, None]).sum(0)


def class_balanced(params, batch, rng):
    weights = 1 / jnp.maximum(frequencies(batch), 1)[batch["label"]]
    return Mean.of(nats(params, batch), batch["mask"], weights)


def carried_over(params, batch, rng):
    """Carry a state from row to row."""

    def turn(state, row):
        state = jnp.tanh(0.5 * state + row)
        return state, state

    y = jax.lax.scan(turn, jnp.float32(0), height(params, batch))[1]
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def shifted(params, batch, rng):
    y = height(params, batch)
    return Mean.of(jnp.square(y + 0.1 * jnp.roll(y, 1) - batch["y"]), batch["mask"])


def by_rank(params, batch, rng):
    off = jnp.where(batch["mask"], errors(params, batch), -1)
    place = jnp.argsort(jnp.argsort(off)).astype(jnp.float32)
    return Mean.of(off * place, batch["mask"])


def worst_row(params, batch, rng):
    worst = jnp.where(batch["mask"], errors(params, batch), 0).max()
    return Mean(worst * counted(batch), counted(batch))


def branch_on_the_sum(params, batch, rng):
    """Scale the loss down above a sum that 8 rows do not reach."""
    sum_ = total(params, batch)
    return Mean(jnp.where(sum_ > 1e5, 0.1 * sum_, sum_), counted(batch))


def until_small(params, batch, rng):
    """Halve the scale until the sum over all rows is below a bound."""
    halve = lambda scale: scale / 2
    scale = jax.lax.while_loop(
        lambda scale: jax.lax.stop_gradient(total(params, batch)) * scale > 30, halve, 1.0
    )
    return Mean.of(errors(params, batch) * scale, batch["mask"])


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, up: (up / jnp.maximum(jnp.linalg.norm(up), 0.1),))


def gradient_of_unit_norm(params, batch, rng):
    off = jnp.square(clipped(height(params, batch)) - batch["y"])
    return Mean.of(off, batch["mask"])


def metric(function, loss=good, **given):
    """Return a loss with a metric that is not a sum."""

    def with_metric(params, batch, rng):
        value = function(params, batch)
        return loss(params, batch, rng), {"of": Mean(value * counted(batch), counted(batch))}

    return with_metric


def f1(params, batch):
    said, true = (height(params, batch) > 4) & batch["mask"], (batch["y"] > 2) & batch["mask"]
    both = (said & true).sum()
    return 2 * both / jnp.maximum(said.sum() + true.sum(), 1)


STATISTIC, FUNCTION = "batch statistic", "function of a sum"
NEIGHBOURS = {
    "linen's BatchNorm, undeclared": of_model(from_linen(Normed(), jnp.zeros((8, 3)),
        jnp.zeros(8, bool)), STATISTIC, 'rows_interact="batch"'),
    "centring in training alone": Planted(centred_in_training, STATISTIC, "faults_of_rows.py:"),
    "softmax over rows": Planted(softmax_over_rows, STATISTIC, "", CLASSIFIER),
    "a contrastive loss": Planted(contrastive, STATISTIC, "", CLASSIFIER),
    "class-balanced weights": Planted(class_balanced, "batch statistic", "", CLASSIFIER),
    "a state carried from row to row": Planted(carried_over, STATISTIC),
    "the neighbour's height": Planted(shifted, STATISTIC),
    "weights by rank": Planted(by_rank, "rows are ranked"),
    "the worst row": Planted(worst_row, FUNCTION),
    "a branch on the sum": Planted(branch_on_the_sum, "branch on the batch"),
    "a loop on the sum": Planted(until_small, "branch on the batch"),
    "a gradient of unit norm": Planted(gradient_of_unit_norm, "custom derivative",
        "custom_vjp"),
    "F1 of a batch": Planted(metric(f1), FUNCTION, "the metric 'of'"),
}  # fmt: skip


def scaled(draw):
    """Return the loss with inputs times `draw(rng, batch)`, in training only."""

    def loss(params, batch, rng):
        if rng is None:
            return good(params, batch, rng)
        times = jnp.broadcast_to(draw(rng, batch), batch["x"].shape)
        return good(params, batch | {"x": batch["x"] * times}, rng)

    return loss


def uniform(key, shape):
    return jax.random.uniform(key, shape, minval=0.5, maxval=1.5)


def coin(params, batch, rng):
    """Draw from numpy during tracing, with an effect on the loss in no case."""
    return good(params, batch, rng) if np.random.rand() < 2 else good(params, batch, None)


_GENERATOR = np.random.default_rng(0)


def by_generator(rng, batch):
    return np.float32(_GENERATOR.uniform(0.5, 1))


def by_python(rng, batch):
    return np.float32(random.uniform(0.5, 1))


def of_keys(keys, batch):
    return jax.vmap(lambda key: uniform(key, (3,)))(keys)


def mixed_up(params, batch, rng):
    """Mix each row with a randomly drawn other row."""
    if rng is None:
        return good(params, batch, rng)
    other = jax.random.permutation(rng, len(batch["row"]))
    mix = lambda x: 0.7 * x + 0.3 * x[other]
    off = jnp.square(mix(height(params, batch)) - mix(batch["y"]))
    return Mean.of(off, batch["mask"])


def half_is_swapped(params, batch, rng):
    """Reverse the labels by a coin flip."""
    if rng is None:
        return good(params, batch, rng)
    swap = jax.random.bernoulli(rng, 0.6)
    y = jnp.where(swap, batch["y"][::-1], batch["y"])
    return good(params, batch | {"y": y}, rng)


def by_first_row(rng, batch):
    return uniform(first_key(row_keys(rng, batch)), batch["x"].shape)


def by_smallest_row(rng, batch):
    return uniform(jax.random.fold_in(rng, batch["row"].min()), (3,))


def by_number_of_rows(rng, batch):
    return uniform(jax.random.fold_in(rng, len(batch["row"])), (3,))


DRAWS = {
    "numpy's draws scale": Planted(scaled(lambda rng, batch: np.float32(np.random.uniform(0.5, 1))),
        "draws of the host", "numpy"),
    "Python's random": Planted(scaled(by_python), "draws of the host", "random"),
    "a generator with state": Planted(scaled(by_generator), "not a function"),
    "noise by position": Planted(scaled(lambda rng, batch: uniform(rng, batch["x"].shape)),
        "key of the batch"),
    "mixup": Planted(mixed_up, "rows mixed by a draw", 'rows_interact="batch"'),
    "rows swapped by a coin": Planted(half_is_swapped, "rows mixed by a draw"),
    "keys of the neighbours": Planted(scaled(lambda rng, batch: of_keys(jnp.roll(row_keys(rng,
        batch), 1), batch)), "key of the batch"),
    "a key from their number": Planted(scaled(by_number_of_rows), "key of the batch"),
}  # fmt: skip
NAMED = {
    "one mask by the first row": Planted(scaled(by_first_row), "one draw for the batch"),
    "one number by the smallest row": Planted(scaled(by_smallest_row), "one draw for the batch"),
}
