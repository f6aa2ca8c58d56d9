"""Evaluation and prediction over a data set: the loss, or an output for each row."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.batches import FiniteBatches
from jtrain.core.loop import IN_FLIGHT
from jtrain.core.loss import Stateful, normalize_loss
from jtrain.core.model import Model
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Batch, Extra, LossFn, Params, RowsInteract
from jtrain.data.batches.workers import Workers
from jtrain.errors import ConfigError, LossError
from jtrain.errors.user_code import api_boundary, check_takes, user_code
from jtrain.losses.metrics import Metric
from jtrain.models.adapters import check_model_type, is_nnx
from jtrain.models.model_loss import ModelLoss
from jtrain.models.ready_losses import regression
from jtrain.parallel import Layout, Strategy, check_divides
from jtrain.train import fit_arguments, fit_data
from jtrain.train.check_batch.first_batch import FirstBatch
from jtrain.train.evaluation import SetEvaluations
from jtrain.train.runtime import enable_compilation_cache

ROWS = 128  # at a time, by default


@api_boundary
def evaluate(
    loss: LossFn | Stateful,
    params: Params,
    data: fit_data.Data,
    *,
    metrics: Sequence[str | Metric] = (),
    batch: int = 0,
    extra: Extra = (),
    rows_interact: RowsInteract = "never",
    parallel: str | Layout = "mirrored",
    devices: Any = 0,
    check_batch: bool = True,
) -> dict[str, Any]:
    """Return the loss and the metrics over all of `data`, each row once, and the count `rows`.

    A loss that is a sum over rows is exact for any batch size and number of devices: sums and
    weights are added up, in float64 over batches. A loss whose rows interact depends on which
    share a batch, and this function cannot detect that: set `rows_interact`.

    Args:
        loss: as for `jt.fit`; its rng is None.
        params: as for `jt.fit`, or an nnx module.
        data: as for `jt.fit`.
        metrics: as for `jt.fit`; numbers, or arrays (a confusion matrix).
        batch: rows at a time, over all devices; 0: 128, or all rows with rows_interact="batch".
        rows_interact: whether rows interact in an evaluation, as in a contrastive loss and not in
            batch norm with running statistics. "batch": all rows of the data must be in one batch.
            "slice": the rows of a batch that one program holds are the group, and the loss is the
            mean over groups.
        devices: as for `jt.fit`.
        check_batch: whether the first batch is checked; see `jt.check_batch`.

    Raises:
        UserError: for arguments that do not fit together.
        LossError: if the loss breaks its contract, or couples rows that would be split.
    """
    loss = fit_arguments.build_loss(loss, metrics)
    layout, single = fit_arguments.build_layout(parallel, devices), rows_interact == "batch"
    strategy, rows = _batches(data, batch, layout, single=single)
    if single and len(rows) > 1:
        raise LossError(
            f"the loss couples the rows of a batch, and batches of {rows.size} would cut the data "
            f"into {len(rows)}: the loss would depend on the batch size. Give one batch of all "
            f"rows (batch={_whole(rows, strategy)}, or data in a single batch), or set "
            f'rows_interact="slice" if the rows of each batch are meant to be the group, or '
            f'rows_interact="never" if layers couple rows in training only, as batch norm does.'
        )
    start = fit_arguments.build_start(loss, params, extra)
    weights = _placed(strategy, _weights(start))
    if check_batch:
        check = FirstBatch(
            normalize_loss(start.loss, ragged=rows.ragged),
            rows.shard(*strategy.part)[0],
            rows.size,
            "the first batch",
            weights=weights,
            draws=False,
        )
        check.check(check.make_sums(weights, strategy))
    sets = SetEvaluations(
        {"data": rows},
        start.loss,
        strategy,
        rows_interact=rows_interact,
        workers=Workers(),
        weights=weights,
        check_hidden=check_batch,
    )
    return sets.measure(weights, "data", iter)


@api_boundary
def predict(
    apply: Callable[..., Any],
    params: Params,
    data: fit_data.Data,
    *,
    batch: int = 0,
    extra: Extra = (),
    parallel: str | Layout = "mirrored",
    devices: Any = 0,
) -> Any:  # a pytree of numpy arrays, each n ...
    """Return the result of `apply(params, batch)` for each row of `data`, in the order of the data.

    Each row is used once, on any number of devices and processes; padding of the last batch is
    dropped. `apply` gets the batch as a loss does, with `row` and `mask`.

    Args:
        apply: pure; returns arrays with a row for each row of the batch: b ... Or a loss built from
            a model, `jt.classifier(model)`, for the model's outputs.
        params: as for `jt.fit`; with an nnx module `apply` is called as `apply(module, batch)`.
        data: as for `jt.fit`.
        batch: rows at a time, over all devices; 0: 128.
        extra: state of the model beside its parameters.
        devices: as for `jt.fit`.

    Raises:
        UserError: for arguments that do not fit together.
        LossError: if `apply` does not return a row for each row.
    """
    strategy, rows = _batches(data, batch, fit_arguments.build_layout(parallel, devices))
    if strategy.psum is not None:
        raise ConfigError(
            "predict cannot run in replicas that add up their sums, because rows are not summed: "
            "omit parallel=, or set impl=jit in it."
        )
    call, host_weights = _outputs(apply, params, extra)
    weights, example = _placed(strategy, host_weights), _batch(strategy, rows, 0)
    return predict_rows(compile_rows(strategy, call, weights, example), strategy, weights, rows)


def compile_rows(
    strategy: Strategy, apply: Callable[[Any, Batch], Any], weights: Any, example: Batch
) -> Callable[[Any, Batch], Any]:
    """Return the program of `apply(weights, batch)` for placed batches like `example`.

    Raises:
        LossError: if `apply` does not return a row for each row.
    """
    size = len(next(iter(example.values())))
    _check_rows(jax.eval_shape(apply, weights, example), size)
    return strategy.compile(lambda w, b: (apply(w, b), b["mask"]), weights, example)


def predict_rows(
    program: Callable[[Any, Batch], Any], strategy: Strategy, weights: Any, rows: FiniteBatches
) -> Any:  # a pytree of numpy arrays, each n ...
    """Return the outputs of a `compile_rows` program for each row, in the order of the data."""
    started, outputs = collections.deque(), []
    for i in range(len(rows)):
        started.append(program(weights, _batch(strategy, rows, i)))
        if len(started) > IN_FLIGHT:
            outputs.append(_drop_padding(*started.popleft()))
    outputs += [_drop_padding(*each) for each in started]
    return jax.tree.map(lambda *batches: np.concatenate(batches), *outputs)


def _outputs(
    apply: Callable[..., Any], params: Params, extra: Extra
) -> tuple[Callable[[Any, Batch], Any], Any]:
    if isinstance(apply, ModelLoss):
        return make_outputs(apply), _weights(fit_arguments.build_start(apply, params, extra))
    if is_nnx(params):
        module = fit_arguments.build_start(lambda module, batch, rng: None, params).module
        check_takes(apply, ("module", "batch"), "apply")
        call = lambda weights, batch: apply(module.module(*weights, None, False), batch)
        return _in_user_code(call), module.arrays()
    check_model_type(params)
    return make_outputs(apply), (params, extra)


def make_outputs(apply: Callable[..., Any] | ModelLoss) -> Callable[[Any, Batch], Any]:
    """Return a function of `(params, extra)` and a batch, whose errors show the user's frames.

    Args:
        apply: `(params, batch) -> outputs`, a loss built from a model, or the model of an `x`.

    Raises:
        LossError: if `apply` does not take these arguments.
    """
    if is_nnx(apply) or isinstance(apply, Model):
        apply = regression(apply)
    if isinstance(apply, ModelLoss):
        return lambda weights, batch: apply.outputs(weights[0], weights[1], batch)
    check_takes(apply, ("params", "batch"), "apply")
    return _in_user_code(lambda weights, batch: apply(weights[0], batch))


def _in_user_code(apply: Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Any]:
    def call(weights: Any, batch: Batch) -> Any:
        with user_code("apply", batch):
            return apply(weights, batch)

    return call


def _weights(start: fit_arguments.FitStart) -> Any:  # (params, extra)
    return start.init(jax.random.key(0)) if callable(start.init) else start.init


def _batches(
    data: fit_data.Data, batch: int, layout: Layout, *, single: bool = False
) -> tuple[Strategy, FiniteBatches]:
    enable_compilation_cache()
    strategy = layout.build()
    rows = fit_data.build_batches(data, batch or -(-ROWS // strategy.shares) * strategy.shares)
    if single and not batch and rows is not data:
        rows = fit_data.build_batches(data, _whole(rows, strategy))
    check_divides(rows.size, strategy.shares, 1)
    return strategy, rows


def _whole(rows: FiniteBatches, strategy: Strategy) -> int:
    """Return the size of a single batch of all rows, a multiple of the strategy's shards."""
    number = getattr(rows, "rows", len(rows) * rows.size)  # with padding where it is not known
    return -(-number // strategy.shares) * strategy.shares


def _placed(strategy: Strategy, tree: Any) -> Any:
    tree = fit_arguments.to_arrays(tree)
    return jax.device_put(tree, strategy.shardings(tree))


def _batch(strategy: Strategy, rows: FiniteBatches, step: int) -> Batch:
    return strategy.place(rows.shard(*strategy.part)[step])


def _check_rows(outputs: Any, size: int) -> None:
    leaves = named_leaves(outputs)
    for name, leaf in leaves.items():
        if leaf.shape[:1] != (size,):
            raise LossError(
                f"predict gives a row for each row of the data, but the result of apply "
                f"{f'under {name} ' if name else ''}for {size} rows has shape {list(leaf.shape)}. "
                f"Return arrays whose first dim is that of the batch, and no sums over it."
            )
    if not leaves:
        raise LossError("predict: apply returned no array. Return one, with a row for each row.")


def _drop_padding(outputs: Any, mask: Any) -> Any:
    outputs, mask = jax.device_get((outputs, mask))
    return outputs if mask.all() else jax.tree.map(lambda x: x[mask], outputs)
