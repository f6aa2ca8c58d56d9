"""The first batch that a loss gets, looked at before anything is learned from it."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import LossOutput, Stateful, normalize_loss
from jtrain.core.pytree import at_least_f32
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch, Extra, Key, LossFn, Params
from jtrain.distributed.multihost import all_gather
from jtrain.train.first_batch.index_uses import find_uses
from jtrain.train.first_batch.labels import (
    OutOfRangeValue,
    counted,
    outside_values,
    refusal,
    with_and_without,
)
from jtrain.train.first_batch.row_broadcasts import check_broadcasts

MOVED = 0.02  # the deviation of what is added to parameters, so that none is 0
Terms: TypeAlias = Callable[[Params, Extra, Batch, Key | None], LossOutput]


class FirstBatch:
    """A batch, and what in it a loss would take for something else.

    The loss is traced and not run. Labels are looked up as the trace looks them up; if one chooses
    no entry, `check` runs the loss on it.

    Args:
        terms: the loss, as `normalize_loss` gives it.
        batch: on the host; of one process its own rows.
        rows: of the whole batch.
        what: which batch it is, in words.
        weights: parameters and extra, or their shapes.
        draws: whether the loss gets a key, as in training.
        origin: of each row of the whole batch its index in the data, if it is known.

    Raises:
        LossError: if a value a row is broadcast against another, each row with every other.
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
    ):
        self._terms, self._draws, self._what, self._origin = terms, draws, what, origin
        self._rows = rows
        self._batch = {name: np.asarray(array) for name, array in with_rows(batch).items()}
        key = jax.eval_shape(lambda: jax.random.key(0)) if draws else None

        def trace(rows: int, terms: Any) -> Any:
            def totals(unknown: Any, batch: Batch) -> list[Any]:
                weights, key = unknown
                return [mean.total for mean in terms(*weights, batch, key).terms.means]

            known: Any = (weights, key)
            return jax.make_jaxpr(totals)(known, self._shapes(rows))

        self._program = trace(rows, terms)
        # Calls that are inlined have lost the places of their equations.
        again = functools.partial(trace, terms=inspect.unwrap(terms))
        check_broadcasts(self._program, again, rows)

    @functools.cached_property
    def suspects(self) -> list[OutOfRangeValue]:
        """Values of rows that no mask hides which choose no entry; on any thread."""
        rows = self._rows
        return outside_values(find_uses(self._program, self._shapes(rows)), self._batch, rows)

    def check(self, sums: Callable[[Batch], tuple[Any, Any]]) -> None:
        """Check that the loss counts no label which chooses no class.

        Where there are several processes each calls this at the same time.

        Args:
            sums: `sums`, compiled, of a batch on the host; called only where there is a doubt.

        Raises:
            DataError: with the row, the value and the shape of what is looked up in.
        """
        every = [
            OutOfRangeValue(*each) for process in all_gather(self.suspects) for each in process
        ]
        for found in {(x.leaf, x.value): x for x in reversed(every)}.values():
            held, mended = with_and_without(self._batch, found)
            before = sums(held)
            if any([counted(before, sums(other)) for other in mended]):  # all, on all processes
                raise refusal(found, self._what, self._origin)

    def sums(self, psum: Callable[[Any], Any] | None) -> Callable[..., tuple[Any, Any]]:
        """Return `((params, extra), batch) -> totals, weights`, pure, of parameters moved a little.

        What begins as zero would hide what a label does.
        """

        def sums(weights: tuple[Params, Extra], batch: Batch) -> tuple[Any, Any]:
            batch, (params, extra) = with_rows(batch, copies=psum is not None), weights
            key = jax.random.key(0) if self._draws else None
            means = self._terms(_moved(params), extra, batch, key).terms.means
            found = [mean.total for mean in means], [mean.weight for mean in means]
            return found if psum is None else psum(at_least_f32(found))

        return sums

    def _shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        canonical = jax.dtypes.canonicalize_dtype
        return {
            name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), canonical(array.dtype))
            for name, array in self._batch.items()
        }


def check_batch(
    loss: LossFn | Stateful,
    params: Params,
    batch: Mapping[str, Any],
    *,
    extra: Extra = (),
    training: bool = True,
) -> None:
    """Check a batch of a loop of your own, as runs and `jt.fit` check their first one.

    Finds integers that choose no class or row of a table (labels out of range or negative, tokens
    outside of the vocabulary) where the loss counts them, and a (b, 1) that is broadcast against a
    (b,). The loss is traced; only where an integer chooses nothing is it run.

    Args:
        loss: as for `jt.make_step`.
        batch: arrays of a row each, on the host or on one device.
        training: whether the loss gets a key; else None, as in evaluation.

    Raises:
        DataError: with the row, the value and the shape.
        LossError: with the operation and both shapes, or if the loss keeps no contract.
    """
    given = {name: np.asarray(array) for name, array in with_rows(batch).items()}
    terms, rows = normalize_loss(loss, ragged=not given["mask"].all()), len(given["mask"])
    weights = jax.tree.map(jnp.asarray, (params, extra))
    look = FirstBatch(terms, given, rows, "the batch", weights=weights, draws=training)
    program = jax.jit(look.sums(None))
    look.check(lambda batch: jax.device_get(program(weights, batch)))


def _moved(params: Params) -> Params:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    draw = lambda key, x: MOVED * jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
    return tree.unflatten([x + draw(key, x) for key, x in zip(keys, leaves, strict=False)])
