"""Rows that a mask hides count for nothing: a loss that counts them is refused, with the line."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import by_name

import jtrain as jt
from jtrain.data import Arrays, Shuffled
from jtrain.errors import LossError
from jtrain.parallel import FSDP, Mirrored

ROWS = 50
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)).astype(np.float32)
DATA = {
    "x": X,
    "y": (X[:, 0] > 0).astype(np.float32),
    "valid": DRAW.random(ROWS) < 0.8,
    "words": DRAW.random((ROWS, 3)) < 0.8,
    "w": DRAW.random(ROWS).astype(np.float32) + 0.5,
}
PARAMS = {"w": jnp.full(3, 0.3)}
ZEROS = {"w": jnp.zeros(3)}


def nats(params, batch):
    return optax.sigmoid_binary_cross_entropy(batch["x"] @ params["w"], batch["y"])


def own_mask(params, batch, rng):
    return jt.Mean.of(nats(params, batch), batch["valid"], batch["w"])


def its_line(params, batch, rng):
    return jt.Mean.of(nats(params, batch), batch["valid"] & batch["mask"], batch["w"])


def masked(params, batch, rng):
    return jt.Mean.of(nats(params, batch), batch["mask"])


def all_rows(params, batch, rng):
    return jt.Mean.of(nats(params, batch), jnp.ones_like(batch["mask"]))


def centred(params, batch, rng):
    x = nats(params, batch)
    return jt.Mean.of(jnp.square(x - jnp.mean(x)), batch["mask"])


def centred_rightly(params, batch, rng):
    x = nats(params, batch)
    return jt.Mean.of(jnp.square(x - jnp.mean(x, where=batch["mask"])), batch["mask"])


def statistic(mask: Callable) -> Any:
    return jt.stateful(
        lambda params, extra, batch, rng: (
            masked(params, batch, rng),
            {},
            {"mean": jt.Mean.of(batch["x"][:, 0], mask(batch))},
        )
    )


def ones(batch):
    return jnp.ones_like(batch["mask"])


# A loss, its initial parameters, and the start of the line that its message advises.
OWN, VISIBLE = 'batch["valid"] & batch["mask"])', 'jt.Mean.of(values, batch["mask"])'
COUNTING = {
    "own mask": (own_mask, PARAMS, OWN),
    "all rows, parameters of zero": (all_rows, ZEROS, VISIBLE),
    "rows that meet": (centred, PARAMS, 'jnp.mean(x, where=batch["mask"])'),
}
SOME = ("own mask", "rows that meet")


@pytest.mark.thorough
@pytest.mark.parametrize("case", by_name(COUNTING, SOME, pytest.mark.thorough))
def test_an_evaluation_refuses_a_loss_that_counts_padding_and_names_the_line(case):
    loss, params, line = case
    with pytest.raises(LossError) as error:
        jt.evaluate(loss, params, DATA, batch=16, devices=2)
    assert line in str(error.value)
    # No batch has padding.
    full = {key: array[:48] for key, array in DATA.items()}
    jt.evaluate(loss, params, full, batch=16, devices=2)


@pytest.mark.thorough
def test_the_line_gives_one_result_for_every_batch_size():
    mask, weight = DATA["valid"], DATA["w"]
    values = np.asarray(nats(PARAMS, DATA), np.float64)
    expected = (values * mask * weight).sum() / (mask * weight).sum()
    for size in (16, 32):
        loss = jt.evaluate(its_line, PARAMS, DATA, batch=size, devices=1)["loss"]
        assert loss == pytest.approx(expected, rel=1e-6)
    assert abs(jt.evaluate(own_mask, PARAMS, DATA, batch=32, check_batch=False)["loss"] - loss) > 0


def each_row(params, batch, rng):
    values = nats(params, batch)
    each = {"of weights": jt.Mean(values, batch["mask"].astype(jnp.float32))}
    return masked(params, batch, rng), each | {"of all": jt.Mean(values, jnp.float32(1))}


def with_shift(params, batch, rng):
    """Subtract the largest of all rows, hidden ones too, from the logits of a softmax."""
    logits = 100 * nats(params, batch)
    shifted = jnp.where(batch["mask"], jnp.exp(logits - logits.max()), 0)
    return jt.Mean(jnp.log(shifted.sum()) + logits.max(), jnp.float32(1))


EXACT = {
    "its line": its_line,
    "coupled, hidden rightly": centred_rightly,
    "a value for each row": each_row,
    "a shift of all rows": with_shift,
    "a logarithm of padding": lambda params, batch, rng: jt.Mean.of(
        jnp.log(batch["x"][:, 0]) * 0 + nats(params, batch), batch["mask"] & (batch["x"][:, 0] > 0)
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("loss", by_name(EXACT, ("a shift of all rows",), pytest.mark.thorough))
def test_losses_that_hide_their_rows_are_let_through(loss):
    """Also where rows meet, where values of hidden rows change, and where some are NaN."""
    for params in (PARAMS, ZEROS):
        jt.evaluate(loss, params, DATA, batch=16, devices=2)


@pytest.mark.thorough
def test_a_check_of_ones_own_loop_looks_at_batches_with_hidden_rows():
    batch = {key: array[:8] for key, array in DATA.items()} | {"row": np.arange(8, dtype=np.int32)}
    jt.check_batch(own_mask, PARAMS, batch | {"mask": np.ones(8, bool)})
    hidden = batch | {"mask": np.arange(8) < 6}
    with pytest.raises(LossError, match="counts rows that the mask hides"):
        jt.check_batch(own_mask, PARAMS, hidden)
    jt.check_batch(its_line, PARAMS, hidden)


QUICK: dict[str, Any] = {"steps": 2, "quiet": True, "lr": 0.1}


def padded(end: str = "pad") -> Shuffled:
    return Shuffled(Arrays(**DATA), size=16, end=end)


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [Mirrored(devices=4, impl="shard_map"), FSDP(devices=2)])
def test_microbatches_and_running_statistics_are_checked_under_every_layout(parallel, compiled):
    how: dict[str, Any] = {
        **QUICK,
        "microbatches": 2,
        "parallel": parallel,
        "extra": {"mean": jnp.float32(0)},
    }
    with pytest.raises(LossError, match="the leaf 'mean' of extra counts rows"):
        jt.fit(statistic(ones), PARAMS, padded(), **how)
    jt.fit(statistic(lambda batch: batch["mask"]), PARAMS, padded(), **how)
    jt.fit(statistic(ones), PARAMS, padded("drop"), **how)
