"""The first batches of a run, read once, and the checks of what a loss makes of them."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.batches import Batches
from jtrain.core.loss import LossOutput, Stateful, normalize_loss, sum_output
from jtrain.core.loss_checks import input_leaves
from jtrain.core.mean import Mean
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch, Extra, Key, LossFn, Params
from jtrain.data.sources.source import to_native
from jtrain.distributed.multihost import all_gather
from jtrain.errors import DataError
from jtrain.parallel import Strategy
from jtrain.train.check_batch.broadcasts import check_broadcasts
from jtrain.train.check_batch.hidden_rows import check_hidden_rows
from jtrain.train.check_batch.labels import (
    OutOfRangeValue,
    describe_outside,
    find_out_of_range,
    is_counted,
    out_of_range_error,
    swap_value,
)
from jtrain.train.check_batch.uses import Uses, find_uses
from jtrain.train.experiment import batch_shapes
from jtrain.train.runtime import check_jit_enabled

_log = logging.getLogger(__name__)
ROWS = ("row", "mask")  # of every batch; a loss may leave them unread
NOISE = 0.02  # standard deviation of the noise added to parameters, so that none is 0
Terms: TypeAlias = Callable[[Params, Extra, Batch, Key | None], LossOutput]


class FirstBatch:
    """Batch whose values a loss might misinterpret.

    The loss is traced, not run. Labels are looked up as in the trace; if one selects no entry,
    `check` runs the loss on it.

    Args:
        terms: the loss, as `normalize_loss` returns it.
        batch: on the host; the rows of this process.
        rows: number of rows of the full batch.
        weights: parameters and extra, or their shapes.
        draws: whether the loss gets a key, as in training.
        origin: for each row of the full batch its index in the data, if known.
        microbatches: of a step, where rows of a batch may be hidden; 0: none are.

    Raises:
        LossError: if one value a row is broadcast against another, pairing all rows.
    """

    def __init__(
        self,
        terms: Terms,
        batch: Mapping[str, Any],
        rows: int,
        what: str,
        *,
        weights: tuple[Params, Extra],
        draws: bool,
        origin: Sequence[int] = (),
        microbatches: int = 0,
    ):
        self.microbatches = microbatches
        self._terms, self.draws, self._what, self._origin = terms, draws, what, origin
        self._rows = rows
        self._batch = {
            name: to_native(name, np.asarray(array)) for name, array in with_rows(batch).items()
        }
        key = jax.eval_shape(lambda: jax.random.key(0)) if draws else None

        def trace(rows: int, terms: Any) -> Any:
            def totals(unknown: Any, batch: Batch) -> list[Any]:
                weights, key = unknown
                output = terms(*weights, batch, key)
                return [*(mean.total for mean in output.terms.means), output]

            known: Any = (weights, key)
            return jax.make_jaxpr(totals)(known, batch_shapes(self._batch, rows))

        self._program = trace(rows, terms)
        # Inlined calls have lost the source locations of their equations.
        again = functools.partial(trace, terms=inspect.unwrap(terms))
        check_broadcasts(self._program, again, rows)
        names = sorted(self._batch)  # the last inputs
        first = len(self._program.jaxpr.invars) - len(names)
        read = set().union(*input_leaves(self._program))
        unread = [n for i, n in enumerate(names, first) if i not in read and n not in ROWS]
        if unread and jax.process_index() == 0:
            _log_unread(tuple(unread), tuple(n for n in names if n not in (*ROWS, *unread)))

    @functools.cached_property
    def _uses(self) -> Uses:
        return find_uses(self._program, batch_shapes(self._batch, self._rows))

    @functools.cached_property
    def suspects(self) -> list[OutOfRangeValue]:
        """Values in unmasked rows that select no entry; on any thread."""
        return find_out_of_range(self._uses, self._batch, self._rows)

    @functools.cached_property
    def outside(self) -> str:
        """The value in an unmasked row for which the loss is not defined; on any thread."""
        return describe_outside(self._uses, self._batch, self._rows, self._what, self._origin)

    def check(self, sums: Callable[[Batch], LossOutput]) -> None:
        """Raise if the loss counts a label that selects no class, or takes one outside its domain.

        Every process calls this at the same time.

        Args:
            sums: of `make_sums`; called only for suspects.

        Raises:
            DataError: with the row, the value and the shape of the indexed array.
        """
        if (name := self._uses.repeated) and jax.process_index() == 0:
            _log_repeated(name)
        if outside := next(filter(None, all_gather(self.outside)), ""):
            raise DataError(outside)
        every = [
            OutOfRangeValue(*each) for process in all_gather(self.suspects) for each in process
        ]
        for found in {(x.leaf, x.value): x for x in reversed(every)}.values():
            original, replaced = swap_value(self._batch, found)
            before = _parts(sums(original))
            counted = [is_counted(before, _parts(sums(other))) for other in replaced]
            if any(counted):  # all processes compute all
                raise out_of_range_error(found, self._what, self._origin)

    def check_hidden(self, sums: Callable[[Batch], LossOutput], parts: int = 1) -> None:
        """Raise if hidden rows change a sum of the loss; see `check_hidden_rows`.

        Args:
            parts: parts of the batch that the step computes one after the other; one is checked.
        """
        own = {name: array[: len(array) // parts] for name, array in self._batch.items()}
        check_hidden_rows(sums, own, self._rows // parts, self._what)

    def make_sums(
        self, weights: tuple[Params, Extra], strategy: Strategy | None = None
    ) -> Callable[[Batch], LossOutput]:
        """Return a function from a host batch to the output of the loss, compiled at its first use.

        Parameters that are initially zero would hide the effect of a label: noise is added to them.

        Args:
            weights: parameters and extra, on the devices.
            strategy: places the batch; None for a batch on one device.
        """
        psum = strategy and strategy.psum

        def sums(weights: tuple[Params, Extra], batch: Batch) -> LossOutput:
            batch, (params, extra) = with_rows(batch, copies=psum is not None), weights
            key = jax.random.key(0) if self.draws else None
            found = self._terms(_add_noise(params), extra, batch, key)
            rows = {"rows": Mean(jnp.sum(batch["mask"]), jnp.float32(1))}
            found = found._replace(metrics={**found.metrics, **rows})
            return found if psum is None else sum_output(found, psum)

        compiled: Callable[..., LossOutput] | None = None if strategy else jax.jit(sums)

        def call(batch: Batch) -> LossOutput:
            nonlocal compiled
            placed = strategy.place(batch) if strategy else batch
            if compiled is None:
                assert strategy is not None, "without one it is compiled for any batch"
                compiled = strategy.compile(sums, weights, placed)
            return jax.device_get(compiled(weights, placed))

        return call


def check_batch(
    loss: LossFn | Stateful,
    params: Params,
    batch: Mapping[str, Any],
    *,
    extra: Extra = (),
    training: bool = True,
) -> None:
    """Check a batch in your own training loop, as runs and `jt.fit` check their first batch.

    Finds integers that select no class or table row (labels out of range or negative, tokens
    outside of the vocabulary) if the loss counts them, and a (b, 1) that is broadcast against a
    (b,). The loss is traced; it is run only if an integer selects nothing.

    Args:
        loss: as for `jt.make_step`.
        batch: arrays with a row for each example, on the host or on one device.
        training: whether the loss gets a key; else None, as in evaluation.

    Raises:
        DataError: with the row, the value and the shape.
        LossError: with the operation and both shapes, or if the loss breaks its contract.
    """
    check_jit_enabled()
    host_batch = {name: np.asarray(array) for name, array in with_rows(batch).items()}
    mask = host_batch["mask"]
    terms, rows = normalize_loss(loss, ragged=not mask.all()), len(mask)
    weights = jax.tree.map(jnp.asarray, (params, extra))
    first = FirstBatch(terms, host_batch, rows, "the batch", weights=weights, draws=training)
    sums = first.make_sums(weights)
    first.check(sums)
    if not mask.all():
        first.check_hidden(sums)


def _parts(output: LossOutput) -> tuple[list[Any], list[Any]]:
    means = output.terms.means
    return [mean.total for mean in means], [mean.weight for mean in means]


@functools.cache  # once
def _log_unread(names: Sequence[str], others: Sequence[str]) -> None:
    arrays = ", ".join(f"`{name}`" for name in names)
    reads = ", ".join(f"`{name}`" for name in others) or "nothing"
    _log.warning(
        f"the loss reads {reads} of its batches, and not {arrays}: leave unread arrays out of the "
        f"data, or read them in the loss (weights of rows are called `weight` in a ready-made one)"
    )


@functools.cache  # once
def _log_repeated(name: str) -> None:
    _log.warning(
        f"the model ends in a {name}, and the loss takes a {name} of its inputs again: training "
        f"is slow, and ends too early. Leave the {name} out of the model, whose outputs are logits "
        f"then, and use jax.nn.{name} on a prediction where chances are wanted"
    )


def _add_noise(params: Params) -> Params:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    draw = lambda key, x: NOISE * jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
    return tree.unflatten([x + draw(key, x) for key, x in zip(keys, leaves, strict=False)])


class FirstRows:
    """First batch as this process reads it: decoding 256 images may take a second.

    Args:
        parts: of which this process reads one.
    """

    def __init__(self, batches: Batches, parts: int):
        self._batches, self._parts = batches, parts

    @functools.cached_property
    def own(self) -> Batch:
        """Rows of this process."""
        return {n: to_native(n, array) for n, array in self._batches[0].items()}

    @property
    def repeated(self) -> Batch:
        """Rows of this process, repeated to a batch of full size: to trace with values."""
        parts = self._parts
        own = self.own.items()
        return self.own if parts == 1 else {n: np.concatenate([x] * parts) for n, x in own}

    @functools.cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of a full batch, as on the devices."""
        return batch_shapes(self.own, self._batches.size)

    def forget(self) -> None:
        """Free the memory of the rows; they are read again if they are needed again."""
        vars(self).pop("own", None)
