"""Rows of several documents: each is to the model as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance

from jtrain.core.placement import Unplaced
from jtrain.data.text.packed import Packed
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.models.attention.scores import places_within
from jtrain.models.transformer import Transformer

pytestmark = pytest.mark.thorough

SIZES = {"vocab": 17, "context": 16, "layers": 2, "heads": 2, "width": 16}
KINDS = {
    "learned": {"positions": {"kind": "learned"}},
    "rotary, scanned": {
        "positions": {"kind": "rotary"},
        "scan": True,
        "remat": "full",
        "window": 5,
    },
    "none": {"positions": {"kind": "none"}, "kv_heads": 1},
}
LENGTHS = [3, 9, 4, 17, 2, 12, 5]


def packed() -> dict:
    tokens = np.random.default_rng(0).integers(0, 17, sum(LENGTHS))
    source = Packed(tokens, context=16, documents=np.cumsum([0, *LENGTHS]))
    rows = source[np.arange(len(source))]
    assert rows["segments"].max() > 2, "several documents in a row"
    return rows | {"mask": np.ones(len(source), bool), "row": np.arange(len(source))}


def alone(rows: dict) -> dict:
    """Put each document in a row of its own."""
    parts = [
        rows["tokens"][row, rows["segments"][row] == number]
        for row in range(len(rows["tokens"]))
        for number in range(1, rows["segments"][row].max() + 1)
    ]
    tokens = np.zeros((len(parts), 17), np.int32)
    for row, part in enumerate(parts):
        tokens[row, : len(part)] = part
    length = np.array([len(part) - 1 for part in parts], np.int32)
    return {"tokens": tokens, "length": length, "mask": np.ones(len(parts), bool)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_loss_and_gradient_of_each_alone(kind: str, strict_dtypes):
    model = Transformer(**SIZES | KINDS[kind]).build(Unplaced())
    params, _ = model.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)
    rows = packed()

    def loss(params, batch):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, segments=segments_of(batch))
        mean, _ = next_token(logits, targets, real)
        return mean.total / mean.weight, mean.weight

    of = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, weight), grads = of(params, {k: jnp.asarray(v) for k, v in rows.items()})
    (expected, count), wanted = of(params, {k: jnp.asarray(v) for k, v in alone(rows).items()})
    assert weight == count == sum(LENGTHS) - len(LENGTHS)
    assert_close(value, expected, 1e-6)
    assert distance(grads, wanted) < 2e-6  # over all: that of a key's bias is 0 and rounding
    # Without the segments it is another loss: documents see one another.
    with_all = {k: jnp.asarray(v) for k, v in rows.items() if k != "segments"}
    assert abs(of(params, with_all)[0][0] - expected) > 1e-3


def test_hidden_states_take_segments_too():
    model = Transformer(**SIZES).build(Unplaced())
    params, _ = model.init(jax.random.key(0))
    batch = {name: jnp.asarray(array) for name, array in packed().items()}
    inputs, segments = batch["tokens"][:, :-1], segments_of(batch)
    hidden, _ = model.hidden(params, {}, inputs, segments)
    logits, _ = model.apply(params, {}, inputs, segments=segments)
    assert_close(hidden @ model.head(params).T, logits, 2e-6)


def test_places_begin_anew_with_each_segment():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 4, 1]])
    places = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 0]]
    assert places_within(segments).tolist() == places


def test_rows_that_are_not_packed_have_no_segments():
    assert segments_of({"tokens": jnp.zeros((1, 3), jnp.int32)}) is None
