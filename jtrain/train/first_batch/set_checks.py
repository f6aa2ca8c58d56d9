"""What is looked at in the batches of a run before it trains on them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.batches import Batches
from jtrain.core.loss import normalize_loss
from jtrain.core.state import TrainState
from jtrain.core.types import Batch
from jtrain.parallel.offload import device_shardings, to_device
from jtrain.train.first_batch.first_batch import FirstBatch
from jtrain.train.setup import TrainSetup


def look(parts: TrainSetup, start: int) -> list[FirstBatch]:
    """Look at the first batch that is trained on, from step `start` on; at none if unasked.

    Raises:
        LossError: if a value a row is broadcast against another, each row with every other.
    """
    train = parts.experiment.train
    indices = getattr(train, "indices", lambda number: np.array(()))
    known = {"draws": True, "origin": indices(parts.train.number(start)).tolist()}
    return _looked(parts, train, lambda: parts.train[start], "the first batch", **known)


def look_at_sets(parts: TrainSetup) -> list[FirstBatch]:
    """Look at the first batch of each set that the run is evaluated on.

    Raises:
        LossError: if a value a row is broadcast against another, each row with every other.
    """
    found = []
    for name, rows in parts.sets.items():
        first = lambda rows=rows: parts.mine(rows)[0]
        found += _looked(parts, rows, first, f"the first batch of `{name}`", draws=False)
    return found


def _looked(
    parts: TrainSetup, batches: Batches, first: Callable[[], Batch], what: str, **known: Any
) -> list[FirstBatch]:
    if not parts.config.checks.first_batch:
        return []
    weights = device_shardings((parts.like.params, parts.like.extra))
    terms = normalize_loss(parts.loss, ragged=batches.ragged)
    return [FirstBatch(terms, first(), batches.size, what, weights=weights, **known)]


def check(parts: TrainSetup, looked: Sequence[FirstBatch], state: TrainState) -> None:
    """Check that no set is cut whose rows meet, and that each label in these batches is a class.

    Every process of the run calls this at the same time.

    Raises:
        LossError: if rows of a set meet that are in several batches.
        DataError: for a label that the loss counts, with the row, the value and the shape.
    """
    for name in parts.sets:
        parts.check_set(name, state)
    like = parts.like.params, parts.like.extra
    for each in looked:
        weights = to_device((state.params, state.extra), like)
        each.check(_of_host(parts, each.sums(parts.strategy.psum), weights))


def _of_host(parts: TrainSetup, fn: Callable[..., Any], weights: Any) -> Callable[[Batch], Any]:
    """`fn(weights, batch)` of a batch on the host, computed where the run computes."""
    program: Callable[..., Any] | None = None

    def call(batch: Batch) -> Any:
        nonlocal program
        placed = parts.strategy.place(batch)
        program = program or parts.strategy.compile(fn, weights, placed)
        return jax.device_get(program(weights, placed))

    return call
