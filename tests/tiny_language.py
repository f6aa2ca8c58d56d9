"""A tiny language model in plain jnp, losses over it, and rows that weigh very differently."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.mean import Mean
from jtrain.core.rows import row_keys

VOCABULARY, TIME, WIDTH, HIDDEN = 32, 8, 16, 32
DATA = ["full", "ragged", "weighted", "terms"]


def init_params(key):
    embed, up, down = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (VOCABULARY, WIDTH)),
        "up": {"kernel": jax.random.normal(up, (WIDTH, HIDDEN)) / 4, "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": jax.random.normal(down, (HIDDEN, VOCABULARY)) / 6},
    }


def stack_layers(params):
    """The parameters of a transformer with `scan` from those of one without."""
    blocks = [params["blocks"][str(i)] for i in range(len(params["blocks"]))]
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def logits(params, tokens, keys=None):
    """Scores of the next token, b t v; a hidden unit in four is dropped where there are keys."""
    x = params["embed"][tokens]
    x = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"][None, None])  # b t f
    if keys is not None:
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.75, x.shape[1:]))(keys)
        x = jnp.where(kept, x / 0.75, 0)
    return x @ params["down"]["kernel"]


def next_token(params, batch, rng, *, data="ragged", dropout=False):
    """The mean over real targets; `weighted` by row, or with a term that weighs rows alike."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    scores = logits(params, inputs, row_keys(rng, batch) if dropout and rng is not None else None)
    log_sum = jax.nn.logsumexp(scores, -1)  # b t
    surprise = log_sum - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    real = (jnp.arange(TIME)[None] < batch["length"][:, None]) & batch["mask"][:, None]
    weights = jnp.broadcast_to(batch["weight"][:, None], real.shape) if data == "weighted" else None
    loss = Mean.of(surprise, real, weights)
    metrics = {"accuracy": Mean.of(scores.argmax(-1) == targets, real)}
    if data == "terms":
        loss = loss + 0.1 * Mean.of(jnp.square(log_sum).mean(-1), batch["mask"])
    return loss, metrics


@functools.cache
def loss_of(data, dropout):
    """One function for each, so that it is traced once however often it is asked for."""
    return functools.partial(next_token, data=data, dropout=dropout)


def batches(data: str, steps: int, *, size: int = 32, seed: int = 0) -> Iterator[dict]:
    """Walks through the vocabulary by threes with some noise; all but `full` are ragged."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        first = random.integers(VOCABULARY, size=(size, 1))
        noise = random.integers(VOCABULARY, size=(size, TIME + 1)) * (
            random.random((size, TIME + 1)) < 0.2
        )
        full = data == "full"
        yield {
            "tokens": ((first + 3 * np.arange(TIME + 1) + noise) % VOCABULARY).astype(np.int32),
            "length": random.integers(TIME if full else 1, TIME + 1, size=size, dtype=np.int32),
            "weight": random.exponential(size=size).astype(np.float32),
            "row": np.arange(size, dtype=np.int32),
            "mask": np.ones(size, bool) if full else random.random(size) < 0.7,
        }
