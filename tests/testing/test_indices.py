"""Leaves that index an array are read off a trace, and numbers out of range are told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from faults_of_programs import LATE, TOKENS, embedded, from_one, house_entropy, one_hot_labels
from planted import CLASSIFIER, classes, entropy, linear, nats

import jtrain as jt
from jtrain.testing.indices import indices
from jtrain.testing.ranges import out_of_range
from jtrain.testing.trials import Trials
from jtrain.types import Mean


def found(fn, **batch):
    """By leaf, the size of what it indexes and what is added to it."""
    names = sorted(batch)
    program = jax.make_jaxpr(lambda *leaves: fn(dict(zip(names, leaves, strict=True))))(
        *[jnp.asarray(batch[name]) for name in names]
    )
    return {(x.leaf, x.size, x.less) for x in indices(program, names)}


TABLE = jnp.arange(10.0).reshape(5, 2)
ONES = np.ones(3, np.int32)


def looped(batch):
    """An index in a scan over parts of the labels."""
    return jax.lax.map(lambda label: TABLE[label], batch["label"])


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda b: TABLE[b["label"]], {("label", 5, 0)}),
        (lambda b: TABLE[b["label"] - 1], {("label", 5, -1)}),
        (lambda b: TABLE[:, b["label"]], {("label", 2, 0)}),
        (lambda b: jnp.take(TABLE, b["label"], 0), {("label", 5, 0)}),
        (lambda b: jnp.take_along_axis(TABLE[:3], b["label"][:, None], 1), {("label", 2, 0)}),
        (lambda b: jax.nn.one_hot(b["label"], 7), {("label", 7, 0)}),
        (lambda b: b["label"][:, None] == np.arange(7)[None], {("label", 7, 0)}),
        (lambda b: jax.vmap(lambda i: TABLE[i])(b["label"]), {("label", 5, 0)}),
        (lambda b: jax.jit(lambda i: TABLE[i])(b["label"].reshape(-1, 1)), {("label", 5, 0)}),
        (looped, {("label", 5, 0)}),
        (lambda b: TABLE[b["label"].clip(0, 4)], set()),  # which is meant
        (lambda b: TABLE[jnp.where(b["label"] < 0, 0, b["label"])], set()),
        (lambda b: TABLE[b["label"] % 5], set()),
        (lambda b: jnp.arange(7)[None] < b["label"][:, None], set()),
        (lambda b: b["label"] * 2, set()),
    ],
)
def test_what_indexes_is_seen(fn, expected):
    assert found(fn, label=ONES) == expected


def checked(loss, params, batch, **more):
    of = jt.testing.subject(loss, params, batch, optimizer=optax.sgd(0.1), **more)
    return out_of_range(of, Trials(of, double=False))


def test_the_row_and_the_range_are_told():
    said = checked(entropy, **LATE).cause.why
    assert "batch['label'] holds 4 in row 6 (1 of 8 numbers lie outside of 0 .. 3)" in said
    assert "planted.py:" in said
    said = checked(embedded, **TOKENS).cause.why
    assert "holds 5 in row 5 (3 of 8 numbers lie outside of 0 .. 4)" in said
    said = checked(from_one, linear(), classes(label=np.zeros(8, np.int32))).cause.why
    assert "holds 0 in row 0 (8 of 8 numbers lie outside of 1 .. 4)" in said


def test_hidden_rows_may_hold_anything():
    mask = np.arange(8) != 6
    assert checked(house_entropy, linear(), LATE["batch"] | {"mask": mask}) is None


def test_further_batches_are_looked_at():
    good = CLASSIFIER["batch"]
    assert checked(one_hot_labels, linear(), good) is None
    bad = {**good, "label": good["label"] + np.int32(4) * (np.arange(8) == 3).astype(np.int32)}
    caught = checked(one_hot_labels, linear(), good, further=lambda: iter([good, bad]))
    assert "in row 3" in caught.cause.why


def test_a_number_that_a_weight_knows_of_is_no_fault():
    def known(params, batch, rng):
        return Mean.of(nats(params, batch), batch["mask"] & (batch["label"] < 4))

    assert checked(known, **LATE) is None
