"""A small attention over split sequences, as a user writes it for a mesh, with one fault."""

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.mean import Mean
from jtrain.testing import place_loss

ROWS, TIME, VOCAB, WIDTH = 8, 8, 16, 8


def params():
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda key, *shape: jax.random.normal(key, shape)
    names = ("query", "key", "value")
    return {
        "embed": draw(keys[0], VOCAB, WIDTH),
        "out": draw(keys[1], WIDTH, VOCAB),
        **{n: draw(k, WIDTH, WIDTH) / 2 for n, k in zip(names, keys[2:], strict=True)},
    }


def batch():
    draw = np.random.default_rng(0)
    return {
        "tokens": draw.integers(0, VOCAB, (ROWS, TIME + 1)).astype(np.int32),
        "length": np.full(ROWS, TIME, np.int32),
        "row": np.arange(ROWS, dtype=np.int32),
        "mask": np.ones(ROWS, bool),
    }


def rotate(x, positions):
    """Rotate the halves of x, b t d, by an angle that grows with the position."""
    angle = (positions[:, None] * 0.5 ** jnp.arange(WIDTH // 2)[None])[None]
    one, two = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([one * cos - two * sin, one * sin + two * cos], -1)


def loss_over(parts, wrong):
    """Return a next-token loss with the queries in `parts` along time."""
    size = TIME // parts

    def loss(params, batch, rng):
        tokens, at = batch["tokens"][:, :-1], jnp.arange(TIME)
        x = params["embed"][tokens]
        q, k, v = (x @ params[name] for name in ("query", "key", "value"))
        within = at % size
        rotary_positions = within if wrong == "positions" else at
        q, k = rotate(q, rotary_positions), rotate(k, rotary_positions)
        visible = at[:, None] >= at[None]
        if wrong == "within":  # query positions within the part, key positions in the sequence
            visible = within[:, None] >= at[None]
        if wrong == "parts":
            visible &= (at // size)[:, None] == (at // size)[None]
        if wrong == "border":  # all of the next part's first position
            visible |= (at[None] == (at // size + 1)[:, None] * size) & (at[None] > at[:, None])
        scores = jnp.where(visible[None], jnp.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5, -1e9)
        x = x + jax.nn.softmax(scores) @ v
        nats = -jax.nn.log_softmax(x @ params["out"])
        nats = jnp.take_along_axis(nats, batch["tokens"][:, 1:, None], 2)[..., 0]
        real = (at[None] < batch["length"][:, None]) & batch["mask"][:, None]
        return Mean.of(nats, real)

    return loss


def over_time(wrong=""):
    """Return the loss with as many parts as the placement has."""
    return place_loss(lambda place: loss_over(place.times, wrong if place.times > 1 else ""))


# The fault, its cause, and words of the explanation.
FAULTS = {
    "causal mask of the part": ("within", "positions", "its causal mask"),
    "causal mask that hides other parts": ("parts", "positions", "its causal mask"),
    "causal mask a position too far at the border": ("border", "positions", "its causal mask"),
    "rotary positions that restart": ("positions", "positions", "Add the offset"),
}
