"""Checks of a run's first batches, before it trains on them."""

import functools
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


def trace_train_batch(setup: TrainSetup, start: int) -> list[FirstBatch]:
    """Trace the loss on the training batch of step `start`; none if the check is off.

    Raises:
        LossError: if one value a row is broadcast against another, pairing all rows.
    """
    train = setup.experiment.train
    indices = getattr(train, "indices", lambda number: np.array(()))
    number = setup.train.number(start)
    options = {"draws": True, "origin": indices(number).tolist()}
    first = lambda: setup.train[start] if number else setup.first.own
    return _trace(setup, train, first, "the first batch", **options)


def trace_set_batches(setup: TrainSetup) -> list[FirstBatch]:
    """Trace the loss on the first batch of each evaluation set.

    Raises:
        LossError: if one value a row is broadcast against another, pairing all rows.
    """
    batches = []
    for name, rows in setup.sets.items():
        first = lambda rows=rows: setup.own_rows(rows)[0]
        batches += _trace(setup, rows, first, f"the first batch of `{name}`", draws=False)
    return batches


def _trace(
    setup: TrainSetup, batches: Batches, first: Callable[[], Batch], what: str, **options: Any
) -> list[FirstBatch]:
    if not setup.config.checks.first_batch:
        return []
    weights = device_shardings((setup.like.params, setup.like.extra))
    terms = normalize_loss(setup.loss, ragged=batches.ragged)
    return [FirstBatch(terms, first(), batches.size, what, weights=weights, **options)]


def check_batches(setup: TrainSetup, batches: Sequence[FirstBatch], state: TrainState) -> None:
    """Raise if a set with coupled rows is split, a label is out of range, or hidden rows count.

    Every process of the run calls this at the same time.

    Raises:
        LossError: if coupled rows of a set are in several batches, or hidden rows change a sum.
        DataError: for a label that the loss counts, with the row, the value and the shape.
    """
    for name in setup.sets:
        setup.check_set(name, state)
    like = setup.like.params, setup.like.extra
    for batch in batches:
        weights = to_device((state.params, state.extra), like)
        compiled = functools.partial(_on_devices, setup, batch.sums(setup.strategy.psum), weights)
        batch.check(compiled())
        if batch.draws and setup.experiment.train.ragged:
            batch.check_hidden(compiled(), setup.config.microbatches)


def _on_devices(setup: TrainSetup, fn: Callable[..., Any], weights: Any) -> Callable[[Batch], Any]:
    """Return `fn(weights, batch)` as a function of a host batch, computed on the run's devices."""
    program: Callable[..., Any] | None = None

    def call(batch: Batch) -> Any:
        nonlocal program
        placed = setup.strategy.place(batch)
        program = program or setup.strategy.compile(fn, weights, placed)
        return jax.device_get(program(weights, placed))

    return call
