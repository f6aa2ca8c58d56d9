"""Correct losses that resemble faulty ones."""

import random

import jax
import jax.numpy as jnp
import numpy as np
from faults_of_rows import contrastive, mixed_up, of_keys, scaled, uniform
from planted import CLASSIFIER, classes, counted, errors, good, height, linear, nats, total

from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys

BATCH = {"rows_interact": "batch"}


def scalar(params, batch, rng):
    return errors(params, batch).mean()


def scalar_with_a_penalty(params, batch, rng):
    return errors(params, batch).mean() + 0.1 * jnp.square(params["slope"]).sum()


def one_mask_a_step(rng, batch):
    return uniform(rng, (3,))


def ignored_labels(params, batch, rng):
    """Ignore labels of -100."""
    known = (batch["label"] >= 0) & batch["mask"]
    safe = jnp.where(known, batch["label"], 0)
    return Mean.of(nats(params, batch | {"label": safe}), known)


def narrow_rows(params, batch, rng):
    return Mean.of(errors(params, batch).astype(jnp.float16), batch["mask"])


def guarded(params, batch, rng):
    """Divide and multiply by the count, with a guard against zero."""
    count = counted(batch)
    return Mean(total(params, batch) / jnp.maximum(count, 1) * count, count)


def signed(params, batch, rng):
    return Mean.of(height(params, batch) * batch["y"], batch["mask"])


def huber(params, batch, rng):
    off = jnp.abs(height(params, batch) - batch["y"])
    return Mean.of(jnp.where(off > 1, off - 0.5, 0.5 * off**2), batch["mask"])


def branch_of_each_row(params, batch, rng):
    one = lambda off: jax.lax.cond(off > 1, jnp.sqrt, jnp.square, off + 1e-3)
    return Mean.of(jax.vmap(one)(errors(params, batch)), batch["mask"])


def loop_in_each_row(params, batch, rng):
    def turns(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x) + 0.1, x)

    return Mean.of(jnp.square(turns(height(params, batch)) - batch["y"]), batch["mask"])


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, up: (up / 2,))


@stateful
def running(params, extra, batch, rng):
    mean = Mean.of(height(params, batch), batch["mask"])
    new = Mean(0.9 * extra["mean"] * mean.weight + 0.1 * mean.total, mean.weight)
    return good(params, batch, rng), {}, {"mean": new}


def tokens(params, batch, rng):
    seen = (jnp.arange(3)[None] < batch["length"][:, None]) & batch["mask"][:, None]
    return Mean.of(jnp.square(batch["x"] * params["slope"][None] - params["offset"]), seen)


def by_the_row(params, batch, rng):
    return Mean.of(errors(params, batch) * (1 + batch["row"] % 3), batch["mask"])


def labelled(*labels):
    return {"params": linear(), "batch": classes(label=np.asarray(labels, np.int32))}


SOME = labelled(0, 1, -100, 3, 0, -100, 1, 3)


# The loss, and further arguments of `assert_invariant`.
def checked_by_a_library(params, batch, rng):
    """Check a randomly drawn item of a list, as beartype does."""
    parts = [errors(params, batch), batch["y"]]
    assert isinstance(random.choice(parts), jax.Array)
    return good(params, batch, rng)


RIGHT = {
    "a plain mean": (scalar, {}), "a plain mean and a penalty": (scalar_with_a_penalty, {}),
    "one mask a step for all rows": (scaled(one_mask_a_step), {}),
    "noise by row": (scaled(lambda rng, batch: of_keys(row_keys(rng, batch), batch)), {}),
    "mixup of an unsplit batch": (mixed_up, BATCH),
    "a contrastive loss of an unsplit batch": (contrastive, CLASSIFIER | BATCH),
    "labels that are ignored": (ignored_labels, SOME), "rows in float16": (narrow_rows, {}),
    "a guard against none": (guarded, {}), "a loss of either sign": (signed, {}),
    "huber": (huber, {}), "a branch of each row": (branch_of_each_row, {}),
    "a loop in each row": (loop_in_each_row, {}),
    "checked by a library that draws": (checked_by_a_library, {}),
    "running statistics": (running, {"extra": {"mean": jnp.float32(0.5)}}),
    "tokens": (tokens, {"batch": {**classes(), "length": np.arange(8, dtype=np.int32) % 3 + 1}}),
    "weights by the row's own number": (by_the_row, {}),
}  # fmt: skip
