"""What trained parameters come to over a whole data set: its loss, or an output for each row."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.core.batches import FiniteBatches
from jtrain.core.evaluate import evaluate as over
from jtrain.core.evaluate import make_evaluate
from jtrain.core.loss import Stateful, normalize_loss
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Batch, Couples, Extra, LossFn, Params
from jtrain.errors import ConfigError, LossError
from jtrain.errors.user_code import api_boundary, check_takes, user_code
from jtrain.models.adapters.any_model import is_nnx, refuse_foreign
from jtrain.models.model_loss import ModelLoss
from jtrain.parallel import Layout, Strategy, check_divides
from jtrain.train import fit_arguments
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.first_batch.first_batch import FirstBatch

ROWS = 128  # at a time, where nothing is said
IN_FLIGHT = 8


@api_boundary
def evaluate(
    loss: LossFn | Stateful,
    params: Params,
    data: fit_arguments.Data,
    *,
    batch: int = 0,
    extra: Extra = (),
    couples: Couples = "nothing",
    parallel: str | Layout = "mirrored",
    devices: Any = 0,
    check_batch: bool = True,
) -> dict[str, float]:
    """The loss and the metrics over all of `data`, each row once; `rows` says how many.

    A loss that is a sum over rows is exact however they are batched and split over devices: sums
    and weights are added up, in float64 over batches. A loss whose rows meet depends on which rows
    are together, and nothing here can see that it is one: say `couples`.

    Args:
        loss: as for `jt.fit`; its rng is None.
        params: as for `jt.fit`, an nnx module among them.
        data: as for `jt.fit`.
        batch: rows at a time, over all devices; 0: 128, or all rows where they meet.
        couples: whether the loss makes rows meet when it is evaluated, as a contrastive loss does
            and batch norm with running statistics does not. "batch": all rows of the data meet, in
            one batch, or it is refused. "slice": the rows of a batch that one program holds are
            meant to be the group, and the loss is the mean over groups.
        devices: as for `jt.fit`.
        check_batch: whether the first batch is looked at; see `jt.check_batch`.

    Raises:
        UserError: for what does not fit together.
        LossError: if the loss keeps no contract, or couples rows that would be split.
    """
    whole = couples == "batch"
    strategy, rows = _laid_out(data, batch, fit_arguments.layout(parallel, devices), whole=whole)
    if whole and len(rows) > 1:
        raise LossError(
            f"the loss couples the rows of a batch, and batches of {rows.size} would cut the data "
            f"into {len(rows)}: its value would depend on their size. Give one batch of all "
            f"rows (batch={_evenly(_rows_of(rows), strategy)}, or data in a batch of its own), or "
            f'say couples="slice" if the rows of each batch are meant to be the group.'
        )
    begin = fit_arguments.start(loss, params, extra)
    weights = _placed(strategy, _weights(begin))
    if check_batch:
        part = rows.shard(*strategy.part)[0]
        look = FirstBatch(
            normalize_loss(begin.loss, ragged=rows.ragged),
            part,
            rows.size,
            "the first batch",
            weights=weights,
            draws=False,
        )
        sums = look.sums(strategy.psum)
        look.check(lambda batch: _run(strategy, sums, weights, batch))
    program = make_evaluate(begin.loss, couples=couples, psum=strategy.psum, ragged=rows.ragged)
    program = strategy.compile(program, weights, _batch(strategy, rows, 0))
    return over(program, weights, (_batch(strategy, rows, i) for i in range(len(rows))))


@api_boundary
def predict(
    apply: Callable[..., Any],
    params: Params,
    data: fit_arguments.Data,
    *,
    batch: int = 0,
    extra: Extra = (),
    parallel: str | Layout = "mirrored",
    devices: Any = 0,
) -> Any:  # a pytree of numpy arrays, each n ...
    """What `apply(params, batch)` gives for each row of `data`, in the order of the data.

    Every row once, on any number of devices and processes; what fills up the last batch is left
    out. `apply` sees the batch as a loss does, with `row` and `mask`.

    Args:
        apply: pure; gives arrays of a row for each row of the batch: b ... Or a loss that was made
            of a model, `jt.classifier(model)`, for what the model gives.
        params: as for `jt.fit`; with an nnx module `apply` is called as `apply(module, batch)`.
        data: as for `jt.fit`.
        batch: rows at a time, over all devices; 0: 128.
        extra: what a model carries beside its parameters.
        devices: as for `jt.fit`.

    Raises:
        UserError: for what does not fit together.
        LossError: if `apply` gives something else than a row for each row.
    """
    strategy, rows = _laid_out(data, batch, fit_arguments.layout(parallel, devices))
    if strategy.psum is not None:
        raise ConfigError(
            "predict was asked to run in copies that add up their sums, and rows are not summed: "
            "leave parallel= out, or set impl=jit in it."
        )
    call, given_weights = _outputs(apply, params, extra)
    weights, example = _placed(strategy, given_weights), _batch(strategy, rows, 0)
    return over_rows(compile_rows(strategy, call, weights, example), strategy, weights, rows)


def compile_rows(
    strategy: Strategy, apply: Callable[[Any, Batch], Any], weights: Any, example: Batch
) -> Callable[[Any, Batch], Any]:
    """Return the program of `apply(weights, batch)` for batches like `example`, placed.

    Raises:
        LossError: if `apply` gives something else than a row for each row.
    """
    size = len(next(iter(example.values())))
    _check_rows(jax.eval_shape(apply, weights, example), size)
    return strategy.compile(lambda w, b: (apply(w, b), b["mask"]), weights, example)


def over_rows(
    program: Callable[[Any, Batch], Any], strategy: Strategy, weights: Any, rows: FiniteBatches
) -> Any:  # a pytree of numpy arrays, each n ...
    """Return what a program of `compile_rows` gives for each row, in the order of the data."""
    started, found = collections.deque(), []
    for i in range(len(rows)):
        started.append(program(weights, _batch(strategy, rows, i)))
        if len(started) > IN_FLIGHT:
            found.append(_real(*started.popleft()))
    found += [_real(*each) for each in started]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def _outputs(
    apply: Callable[..., Any], params: Params, extra: Extra
) -> tuple[Callable[[Any, Batch], Any], Any]:
    """`apply` as a function of the weights and a batch, and the weights."""
    if isinstance(apply, ModelLoss):
        return outputs_of(apply), _weights(fit_arguments.start(apply, params, extra))
    if is_nnx(params):
        module = fit_arguments.start(lambda module, batch, rng: None, params).module
        within = lambda w, batch: apply(module.module(*w, None, False), batch)
        check_takes(apply, ("module", "batch"), "apply")
        return _guarded(within), module.arrays()
    refuse_foreign(params)
    return outputs_of(apply), (params, extra)


def outputs_of(apply: Callable[..., Any] | ModelLoss) -> Callable[[Any, Batch], Any]:
    """Return a function of `(params, extra)` and a batch, whose errors show the user's frames.

    Args:
        apply: `(params, batch) -> outputs`, or a loss that was made of a model.

    Raises:
        LossError: if `apply` cannot be called so.
    """
    if isinstance(apply, ModelLoss):
        return lambda weights, batch: apply.outputs(weights[0], weights[1], batch)
    check_takes(apply, ("params", "batch"), "apply")
    return _guarded(lambda weights, batch: apply(weights[0], batch))


def _guarded(apply: Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Any]:
    """`apply`, of which errors are told in the user's own frames."""

    def call(weights: Any, batch: Batch) -> Any:
        with user_code("apply", batch):
            return apply(weights, batch)

    return call


def _weights(begin: fit_arguments.FitStart) -> Any:  # (params, extra)
    """What a model starts from."""
    return begin.init(jax.random.key(0)) if callable(begin.init) else begin.init


def _laid_out(
    data: fit_arguments.Data, batch: int, layout: Layout, *, whole: bool = False
) -> tuple[Strategy, FiniteBatches]:
    """Where it is computed, and what of, in batches that split evenly, or in a whole one."""
    keep_compiled_programs()
    strategy = layout.build()
    rows = fit_arguments.once(data, batch or _evenly(ROWS, strategy))
    if whole and not batch and rows is not data:
        rows = fit_arguments.once(data, _evenly(_rows_of(rows), strategy))
    check_divides(rows.size, strategy.shares, 1)
    return strategy, rows


def _evenly(rows: int, strategy: Strategy) -> int:
    """So many rows or a few more, which divide into the parts of a strategy."""
    return -(-rows // strategy.shares) * strategy.shares


def _rows_of(rows: FiniteBatches) -> int:
    """How many rows a data set has; its last batch filled up where it does not say."""
    return getattr(rows, "rows", len(rows) * rows.size)


def _run(strategy: Strategy, fn: Callable[..., Any], weights: Any, batch: Batch) -> Any:
    """`fn(weights, batch)` of a batch on the host, computed where the strategy computes."""
    placed = strategy.place(batch)
    return jax.device_get(strategy.compile(fn, weights, placed)(weights, placed))


def _placed(strategy: Strategy, tree: Any) -> Any:
    tree = fit_arguments.arrays(tree)
    return jax.device_put(tree, strategy.shardings(tree))


def _batch(strategy: Strategy, rows: FiniteBatches, step: int) -> Batch:
    """The rows that this process reads, on the devices."""
    return strategy.place(rows.shard(*strategy.part)[step])


def _check_rows(outputs: Any, size: int) -> None:
    """Makes sure that there is a row of output for each row of the batch."""
    leaves = named_leaves(outputs)
    for name, leaf in leaves.items():
        if leaf.shape[:1] != (size,):
            raise LossError(
                f"predict gives a row for each row of the data, and what apply returned "
                f"{f'as {name} ' if name else ''}for {size} rows has shape {list(leaf.shape)}. "
                f"Return arrays whose first dim is that of the batch, and no sums over it."
            )
    if not leaves:
        raise LossError("predict: apply returned no array. Return one, with a row for each row.")


def _real(outputs: Any, mask: Any) -> Any:
    """The rows that are no padding, on the host."""
    outputs, mask = jax.device_get((outputs, mask))
    return outputs if mask.all() else jax.tree.map(lambda x: x[mask], outputs)
