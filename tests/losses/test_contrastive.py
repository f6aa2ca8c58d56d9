"""Two towers: the formula, the mask, the temperature, and rows on many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close

from jtrain.core.mean import Mean
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.contrastive import contrastive
from jtrain.parallel import FSDP, Mirrored

DRAW = np.random.default_rng(0)
LEFT, RIGHT = jnp.asarray(DRAW.standard_normal((2, 16, 6)), jnp.float32)
MASK = jnp.arange(16) % 5 != 3


def in_numpy(left, right, log_scale):
    """Compute the pseudo-code of the paper over the given rows."""
    left, right = (np.asarray(x, np.float64) for x in (left, right))
    left, right = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (left, right))
    logits = left @ right.T * np.exp(log_scale)
    own = np.arange(len(left))
    rows = np.log(np.exp(logits).sum(1)) - logits[own, own]
    columns = np.log(np.exp(logits).sum(0)) - logits[own, own]
    return (rows.mean() + columns.mean()) / 2, (logits.argmax(1) == own).mean()


def test_gives_the_formula_over_the_rows_that_count():
    spoilt = [jnp.where(MASK[:, None], x, jnp.nan) for x in (LEFT, RIGHT)]
    value, metrics = jax.jit(contrastive)(*spoilt, jnp.float32(1.2), MASK)
    want, hits = in_numpy(LEFT[MASK], RIGHT[MASK], 1.2)
    assert_close(value.value(), want, 1e-6)
    assert_close(metrics["accuracy"].value(), hits, 1e-6)


def test_the_gradient_is_the_slope_and_hidden_rows_have_none():
    mean = lambda left, s: contrastive(left, RIGHT, s, MASK)[0].total / MASK.sum()
    spoilt = jnp.where(MASK[:, None], LEFT, jnp.nan)
    grad, by_scale = jax.jit(jax.grad(mean, (0, 1)))(spoilt, jnp.float32(1.2))
    assert not grad[~MASK].any()
    slope = lambda f: (f(1e-5) - f(-1e-5)) / 2e-5
    assert_close(by_scale, slope(lambda e: in_numpy(LEFT[MASK], RIGHT[MASK], 1.2 + e)[0]), 1e-4)
    way = np.float64(RIGHT[MASK])
    moved = lambda e: in_numpy(np.float64(LEFT[MASK]) + e * way, RIGHT[MASK], 1.2)[0]
    along = grad[MASK] * way
    assert_close(along.sum(), slope(moved), 1e-6, terms=np.abs(along).sum())


def test_a_scale_beyond_a_hundred_is_a_hundred():
    run = jax.jit(contrastive)
    steep, bound = (run(LEFT, RIGHT, jnp.float32(s), MASK)[0] for s in (9, np.log(100)))
    assert_close(steep.total, bound.total, 1e-5)
    of = lambda s: contrastive(LEFT, RIGHT, s, MASK)[0].total
    assert jax.jit(jax.grad(of))(jnp.float32(9)) == 0


def test_with_one_row_there_is_nothing_to_choose():
    alone = jnp.arange(16) == 4
    value, _ = jax.jit(contrastive)(LEFT, RIGHT, jnp.float32(1), alone)
    assert value.value() == 0


def towers(params, batch, rng) -> tuple[Mean, dict]:
    del rng
    left, right = (batch[name] @ params[name] for name in ("left", "right"))
    return contrastive(left, right, params["log_scale"], batch["mask"])


BATCH = {"left": LEFT, "right": RIGHT, "mask": MASK, "row": np.arange(16, dtype=np.int32)}
BATCH = {name: np.asarray(x) for name, x in BATCH.items()}
SGD = optax.sgd(0.5)


def started():
    draw = np.random.default_rng(1)
    kernel = lambda: jnp.asarray(draw.standard_normal((6, 8)), jnp.float32)
    params = {"left": kernel(), "right": kernel(), "log_scale": jnp.float32(1)}
    return new_state(params, SGD, jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where",
    [FSDP(devices=4, min_size=0), pytest.param(Mirrored(devices=8), marks=pytest.mark.slow)],
    ids=repr,
)
def test_rows_on_many_devices_meet_all_the_same(where):
    strategy = where.build()
    step = make_step(towers, SGD, couples="batch", psum=strategy.psum, ragged=True)
    state = jax.device_put(started(), strategy.shardings(started()))
    batch = strategy.place(BATCH)
    state, metrics = strategy.compile(step, state, batch, keeps=True)(state, batch)
    want, wanted = jax.jit(make_step(towers, SGD, couples="batch", ragged=True))(started(), BATCH)
    assert metrics["loss"].value() == pytest.approx(wanted["loss"].value(), rel=1e-6)
    for name, leaf in want.params.items():
        moved = jnp.linalg.norm(leaf - started().params[name])
        assert moved > 0
        assert jnp.linalg.norm(np.asarray(state.params[name]) - leaf) <= 1e-6 * moved + 1e-6


def test_microbatches_would_part_the_rows():
    with pytest.raises(ValueError, match=r"microbatches=1"):
        make_step(towers, SGD, couples="batch", microbatches=2)
    make_step(towers, SGD, couples="batch", microbatches=1)
