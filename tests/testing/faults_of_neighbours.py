"""Losses in which rows interact."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from planted import (
    CLASSES,
    CLASSIFIER,
    Planted,
    counted,
    errors,
    good,
    height,
    logits,
    nats,
    total,
)

from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.models.adapters.library_modules import mean_of_slices
from jtrain.models.adapters.linen import from_linen
from jtrain.models.adapters.nnx import from_nnx


def meaned(values, mask):
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)


class Normed(nn.Module):
    """The batch norm model of docs/adapters.md."""

    @nn.compact
    def __call__(self, x, mask, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x), mask=mask[:, None])
        return nn.Dense(1)(x)[:, 0]


class NormedNnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x, mask):
        return self.last(self.norm(self.first(x), mask=mask[:, None]))[:, 0]


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


def centred_without_a_gradient(params, batch, rng):
    y = height(params, batch)
    y = y - jax.lax.stop_gradient(meaned(y, batch["mask"]))
    return Mean.of(jnp.square(y - batch["y"]), batch["mask"])


def normalized_advantages(params, batch, rng):
    gain, mask = batch["y"], batch["mask"]
    gain = gain - meaned(gain, mask)
    gain = gain / jnp.sqrt(meaned(gain**2, mask) + 1e-6)
    return Mean.of(height(params, batch) * gain, mask)


def divided_by_the_largest(params, batch, rng):
    y = jnp.where(batch["mask"], height(params, batch), 0)
    return Mean.of(jnp.square(y / jnp.abs(y).max() - batch["y"]), batch["mask"])


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


def hardest_negative(params, batch, rng):
    y, mask = height(params, batch), batch["mask"]
    far = jnp.abs(y[:, None] - y[None])
    others = mask[None] & ~jnp.eye(len(y), dtype=bool)
    return Mean.of(jax.nn.relu(1 - jnp.where(others, far, 1e9).min(1)), mask)


def redundancy(params, batch, rng):
    """Penalize the correlation of outputs over the batch, as Barlow twins do."""
    mask = batch["mask"][:, None]
    out = jnp.where(mask, logits(params, batch), 0)
    moment = out.T @ out / jnp.maximum(mask.sum(), 1)
    return Mean(jnp.square(moment - jnp.eye(CLASSES)).sum() * counted(batch), counted(batch))


def pairs(params, batch, rng):
    """Rank all pairs of rows; two halves have fewer pairs than the whole."""
    y, mask = height(params, batch), batch["mask"]
    both = mask[:, None] & mask[None] & (batch["y"][:, None] > batch["y"][None])
    return Mean.of(jax.nn.softplus(y[None] - y[:, None]), both)


def frequencies(batch):
    return (jax.nn.one_hot(batch["label"], CLASSES) * batch["mask"][:, None]).sum(0)


def class_balanced(params, batch, rng):
    weights = 1 / jnp.maximum(frequencies(batch), 1)[batch["label"]]
    return Mean.of(nats(params, batch), batch["mask"], weights)


def balanced_in_the_total(params, batch, rng):
    share = frequencies(batch) / jnp.maximum(counted(batch), 1)
    values = nats(params, batch) * (1 - share)[batch["label"]]
    return Mean.of(values, batch["mask"])


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


def trimmed(params, batch, rng):
    """Drop the rows above the median."""
    off = errors(params, batch)
    most = jnp.nanmedian(jnp.where(batch["mask"], off, jnp.nan))
    return Mean.of(jnp.where(off > most, 0, off), batch["mask"])


def by_rank(params, batch, rng):
    off = jnp.where(batch["mask"], errors(params, batch), -1)
    place = jnp.argsort(jnp.argsort(off)).astype(jnp.float32)
    return Mean.of(off * place, batch["mask"])


def worst_row(params, batch, rng):
    worst = jnp.where(batch["mask"], errors(params, batch), 0).max()
    return Mean(worst * counted(batch), counted(batch))


def root_of_the_mean(params, batch, rng):
    mean = total(params, batch) / jnp.maximum(counted(batch), 1)
    return Mean(jnp.sqrt(mean + 1e-6) * counted(batch), counted(batch))


def branch_on_the_sum(params, batch, rng):
    """Scale the loss down above a sum that 8 rows do not reach."""
    sum_ = total(params, batch)
    return Mean(jnp.where(sum_ > 1e5, 0.1 * sum_, sum_), counted(batch))


def cond_on_the_sum(params, batch, rng):
    far = jnp.where(batch["mask"], jnp.abs(batch["y"]), 0).sum() > 5e3
    scale = jax.lax.cond(far, lambda: 0.1, lambda: 1.0)
    return Mean.of(scale * errors(params, batch), batch["mask"])


def capped(params, batch, rng):
    return Mean(jnp.minimum(total(params, batch), 1e6), counted(batch))


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
    """Return a loss with a metric that is no sum."""

    def with_metric(params, batch, rng):
        value = function(params, batch)
        return loss(params, batch, rng), {"of": Mean(value * counted(batch), counted(batch))}

    return with_metric


def f1(params, batch):
    said, true = (height(params, batch) > 4) & batch["mask"], (batch["y"] > 2) & batch["mask"]
    both = (said & true).sum()
    return 2 * both / jnp.maximum(said.sum() + true.sum(), 1)


def precision(params, batch):
    said, true = (height(params, batch) > 1) & batch["mask"], (batch["y"] > 0) & batch["mask"]
    return (said & true).sum() / jnp.maximum(said.sum(), 1)


def root(params, batch):
    return jnp.sqrt(total(params, batch) / jnp.maximum(counted(batch), 1))


def perplexity(params, batch):
    nats_ = jnp.where(batch["mask"], nats(params, batch), 0)
    return jnp.exp(nats_.sum() / jnp.maximum(counted(batch), 1))


def explained(params, batch):
    far = jnp.square(batch["y"] - meaned(batch["y"], batch["mask"]))
    return 1 - total(params, batch) / (jnp.where(batch["mask"], far, 0).sum() + 1e-3)


def largest(params, batch):
    return jnp.where(batch["mask"], errors(params, batch), 0).max()


def area(params, batch):
    """Return the area under the curve of true and false positives."""
    y, true = height(params, batch), batch["y"] > 0
    pairs_ = (true & batch["mask"])[:, None] & (~true & batch["mask"])[None]
    return (pairs_ & (y[:, None] > y[None])).sum() / jnp.maximum(pairs_.sum(), 1)


STATISTIC, FUNCTION = "batch statistic", "function of a sum"
FAULTS = {
    "linen's BatchNorm, undeclared": of_model(
        from_linen(Normed(), jnp.zeros((8, 3)), jnp.zeros(8, bool)), STATISTIC, 'couples="batch"'
    ),
    "nnx's BatchNorm, undeclared": of_model(from_nnx(NormedNnx), STATISTIC, 'couples="batch"'),
    "centring in training alone": Planted(
        centred_in_training, STATISTIC, "faults_of_neighbours.py:"
    ),
    "centring without a gradient": Planted(centred_without_a_gradient, STATISTIC),
    "advantages normalized in the batch": Planted(normalized_advantages, STATISTIC),
    "divided by the largest of the batch": Planted(divided_by_the_largest, STATISTIC),
    "softmax over rows": Planted(softmax_over_rows, STATISTIC, "", CLASSIFIER),
    "a contrastive loss": Planted(contrastive, STATISTIC, "", CLASSIFIER),
    "the hardest negative": Planted(hardest_negative, STATISTIC),
    "redundancy reduction": Planted(redundancy, FUNCTION, "", CLASSIFIER),
    "a loss over pairs": Planted(pairs, STATISTIC),
    "class-balanced weights": Planted(class_balanced, "weights of the batch", "", CLASSIFIER),
    "class-balanced values": Planted(balanced_in_the_total, STATISTIC, "", CLASSIFIER),
    "a state carried from row to row": Planted(carried_over, STATISTIC),
    "the neighbour's height": Planted(shifted, STATISTIC),
    "rows above the median dropped": Planted(trimmed, "rows are ranked"),
    "weights by rank": Planted(by_rank, "rows are ranked"),
    "the worst row": Planted(worst_row, FUNCTION),
    "the root of the mean": Planted(root_of_the_mean, FUNCTION),
    "a branch on the sum": Planted(branch_on_the_sum, "branch on the batch"),
    "another branch on a sum": Planted(cond_on_the_sum, "branch on the batch"),
    "a sum that is capped": Planted(capped, "branch on the batch"),
    "a loop on the sum": Planted(until_small, "branch on the batch"),
    "a gradient of unit norm": Planted(gradient_of_unit_norm, "gradient", "custom_vjp"),
    "F1 of a batch": Planted(metric(f1), FUNCTION, "the metric 'of'"),
    "precision of a batch": Planted(metric(precision), FUNCTION, "the metric 'of'"),
    "RMSE of a batch": Planted(metric(root), FUNCTION, "the metric 'of'"),
    "perplexity of a batch": Planted(
        metric(perplexity, loss=lambda p, b, rng: Mean.of(nats(p, b), b["mask"])),
        FUNCTION,
        "the metric 'of'",
        CLASSIFIER,
    ),
    "R squared of a batch": Planted(metric(explained), FUNCTION, "the metric 'of'"),
    "the largest error of a batch": Planted(metric(largest), FUNCTION, "the metric 'of'"),
    "the area under a curve": Planted(metric(area), FUNCTION, "the metric 'of'"),
}
