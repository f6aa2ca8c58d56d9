"""`jt.fit`: training from a script or a notebook, without a config file."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import optax
from pydantic import ValidationError

from jtrain.checkpoint.retention import BestMetric
from jtrain.config.configclass import configclass
from jtrain.config.precision import Precision
from jtrain.config.sections import Guard
from jtrain.config.top import RUNS
from jtrain.core.loss import Stateful
from jtrain.core.placement import Placement
from jtrain.core.types import Extra, LossFn, Params, RowsInteract
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import ConfigError, LossError
from jtrain.errors.user_code import api_boundary
from jtrain.io.jsonl import read_rows
from jtrain.io.log import LOG, RunLog
from jtrain.losses.metrics import Metric
from jtrain.optim.join import Schedule
from jtrain.optim.recipe import OptimizerConfig
from jtrain.parallel import Parallel
from jtrain.train import fit_arguments, fit_data
from jtrain.train.experiment import Experiment, RunConfig
from jtrain.train.fit_result import Fitted
from jtrain.train.hooks.evaluation import EvaluationResult
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.hooks.log import MetricHistory
from jtrain.train.hooks.signals import Signals
from jtrain.train.processes import join_run
from jtrain.train.restore import restore_run
from jtrain.train.run import run, start_run
from jtrain.train.run_store import MemoryStore
from jtrain.train.runtime import enable_compilation_cache, reuse_memory
from jtrain.train.trackers import TrackerConfig
from jtrain.train.trainer import train_to_end


@api_boundary
def fit(
    loss: LossFn | Stateful,
    params: Params,
    data: fit_data.Data,
    optimizer: str | OptimizerConfig | optax.GradientTransformation = "adamw",
    *,
    steps: int | str | None = None,
    epochs: int | float | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | Schedule | None = None,
    valid: fit_data.Data = None,
    valid_every: int | str = 0,
    valid_batch: int = 0,
    valid_rows_interact: Literal["batch", "slice"] = "batch",
    best: str = "",
    metrics: Sequence[str | Metric] = (),
    class_weight: Mapping[int, float] | None = None,
    hooks: Sequence[Observer] = (),
    every: int | str = 0,
    extra: Extra = (),
    seed: int = 0,
    microbatches: int = 1,
    steps_per_call: int | Literal["auto"] = "auto",
    rows_interact: RowsInteract | None = None,
    precision: str | Precision = "f32",
    parallel: str | Parallel = "mirrored",
    devices: Any = 0,
    guard: str | Guard = "skip",
    tokens: int = 0,
    name: str = "",
    directory: Path | str | None = None,
    checkpoint_every: int | str = 0,
    trackers: Sequence[str | TrackerConfig] = (),
    check_batch: bool = True,
    quiet: bool = False,
) -> Fitted:
    """Train `params` to minimise `loss`, over all devices, and return the result.

    The processes that a launcher started train together, as those of `jt.run` do; a script that
    makes arrays before it calls `fit` calls `jt.join_processes` first.

    ```python
    result = jt.fit(loss, params, (x, y), steps=1000, lr=1e-2)
    result.params, result.history["loss"]
    ```

    Args:
        loss: `(params, batch, rng)`, as `make_step` takes it; a loss made from a model, such as
            `jt.classifier(model)`; for an nnx module a function of `(module, batch, rng)`.
        params: a pytree of arrays, which is not changed; a function `key -> (params, extra)`; an
            nnx module; or a Model.
        data: arrays by name, `(x, y)`, a source of rows, or batches; a function that yields batches
            `(x, y)`, `(x, y, weight)` or arrays by name; PyTorch's tensors, datasets and
            DataLoaders.
        optimizer: a name, a config of `jtrain.optim`, or an optax transformation.
        steps: number of updates. Like the other durations it may be "3 epochs", "2M tokens", "10%"
            or "5 minutes".
        epochs: passes over all rows, in place of `steps`.
        batch: rows a step, over all devices; 32 by default, or the batch size of a loader.
        lr: peak learning rate of an optimizer that is named; 1e-3 for adam, adamw and nadamw.
        schedule: learning rate schedule, a name or a config; constant by default.
        valid: validation data, as `data`; several sets by name: `{"valid": (x, y), ...}`; or the
            fraction of the rows of `data`, 0.2, that is held out.
        valid_every: steps between evaluations; 0: ten evaluations a run. The last step is
            evaluated in any case.
        valid_batch: rows a batch in evaluation; 0: as many as in training.
        valid_rows_interact: how a loss with `rows_interact="batch"` is evaluated. "batch": each set
            is one batch, or an error is raised. "slice": only the rows of each batch interact.
        best: `loss`, `highest accuracy` or `NAME/loss`: return the weights of the evaluation that
            was best by this metric.
        metrics: further metrics of a loss made from a model: names such as "auc", and functions;
            see `jt.metrics`. An evaluation has all of them, a step those that are means of rows.
        class_weight: how many times a row of training counts, by its label: `{0: 1.0, 1: 3.0}`. A
            label that is left out counts once. An evaluation counts each row once. An array
            `weight` of the data, a number a row, counts in both.
        hooks: `jt.Hook`s, `jt.EarlyStop`, or functions of (step, numbers), (step, state) or (step,
            results).
        every: steps between two log lines, and two entries of the history; 0: about 50 a run. The
            last step has an entry in any case.
        extra: state beside the parameters that the loss updates and no gradient is taken of.
        seed: of the order of the rows, and of the keys that the loss gets.
        microbatches: parts of a batch whose gradients are accumulated.
        steps_per_call: steps in one call of the compiled function; "auto": several where a step is
            small, and fewer before each step that is evaluated, saved, or seen by a hook.
        rows_interact: whether the loss of a row depends on other rows; see `make_step`. By default
            the value of the model (batch norm: "batch"), else "never".
        precision: that the loss computes in: f32, bf16, f16, fp8, or a config.
        parallel: strategy: mirrored, fsdp, single, or a config.
        devices: number of devices, 0 for all; their indices, `[0, 2]`; names, "cpu", "gpu:1",
            `["gpu:0", "gpu:1"]`; or JAX devices.
        tokens: in a row, to report the speed in tokens; 0 reports it in rows.
        guard: policy for steps that are not finite: skip, stop, rollback (for a run with a
            directory), or a config of `jtrain.config`.
        name: of a run in runs/NAME, which is written to the disk: the same call resumes it, and a
            call with more `steps` trains it longer.
        directory: of such a run, if it is another.
        checkpoint_every: steps between checkpoints of such a run; 0: ten a run.
        trackers: services that get the metrics of such a run: "tensorboard", "wandb", "mlflow", or
            values of `jt.trackers`.
        check_batch: check the first batch before training; see `jt.check_batch`.
        quiet: print nothing.

    Raises:
        UserError: for arguments that contradict each other, before anything is trained.
        LossError: if the guard ends the run at a step that is not finite.
    """
    duration = fit_arguments.build_steps(steps, epochs)
    loss = fit_arguments.build_loss(loss, metrics, class_weight)
    start = fit_arguments.build_start(loss, params, extra, rows_interact)
    batch = batch or fit_data.loader_size(data)
    data, valid = fit_data.split_validation(data, valid)
    training = fit_data.build_train_batches(data, batch, seed=seed)
    if tokens < 0:
        raise ConfigError(f"tokens={tokens}: must be the tokens of a row, or 0 for rows a second.")
    rows = training.size
    valid_batches = fit_data.build_evaluation_sets(valid, valid_batch or rows)
    transformation = optimizer if isinstance(optimizer, optax.GradientTransformation) else None

    @configclass
    class Config(RunConfig):
        """Config of the call."""

        optimizer: Any

        def rename_keys(self, message: str) -> str:
            """Name the arguments of this function."""
            for key, name in fit_arguments.ARGUMENTS.items():
                message = message.replace(key, name)
            return message

        def code_root(self) -> Any:
            """Return the loss, and the class of a module whose arrays are trained."""
            return loss, type(params)

        def build(self, place: Placement) -> Experiment:
            del place
            return Experiment(
                init=start.init,
                loss=start.loss,
                train=training,
                optimizer=transformation or self.optimizer,
                valid=valid_batches,
                rows_interact=start.rows_interact,
                tokens=tokens,
            )

    has_directory = bool(name) or directory is not None
    values: dict[str, Any] = {
        "experiment": "fit",
        "name": name or "fit",
        "seed": seed,
        "steps": duration,
        "batch": rows,
        "microbatches": microbatches,
        "steps_per_call": steps_per_call,
        "optimizer": fit_arguments.build_optimizer(optimizer, lr, schedule),
        "precision": fit_arguments.build_precision(precision),
        "parallel": fit_arguments.build_strategy(parallel, devices),
        "guard": fit_arguments.build_guard(guard, has_checkpoints=has_directory),
        # Durations are steps once the data is known.
        "evaluate": {
            "every": valid_every or "10%",
            "batch": valid_batch,
            "rows_interact": valid_rows_interact,
        },
        "checkpoint": {"every": checkpoint_every or ("10%" if has_directory else 0), "best": best},
        "log": {"every": every or "2%"},
        "trackers": fit_arguments.build_trackers(trackers, has_directory=has_directory),
        "checks": {"first_batch": check_batch},
    }
    try:
        config = Config(**values)
    except ValidationError as error:
        raise ConfigError(fit_arguments.describe_argument(error, Config)) from None
    for key, words in config.problems():
        raise ConfigError(config.rename_keys(f"{key}: {words}"))
    with open(os.devnull, "w") as nowhere:
        screen = nowhere if quiet else None
        if has_directory:
            found = _fit_in_directory(config, Path(directory or RUNS / name), hooks, screen)
        else:
            cluster = join_run(config, None)
            with RunLog(screen, shows=cluster.index == 0, keep_lines=False) as log:
                if cluster.warning:
                    LOG.warning(cluster.warning)
                found = _fit_in_memory(config, hooks, log)
    return dataclasses.replace(found, loss=loss, start=start)


def _fit_in_memory(config: RunConfig, hooks: Sequence[Observer], log: RunLog) -> Fitted:
    reuse_memory()
    enable_compilation_cache()
    HEARTBEAT.phase("start")
    store = MemoryStore()
    program, started, own = start_run(config, store, hooks)
    with Signals() as signals:
        trained = train_to_end(program, started, store, signals, log, own)
    if trained.status == "failed":
        raise LossError(trained.why)
    ended = trained.ended
    trained.history.row(ended.step, "", ended.numbers)
    if trained.why:
        LOG.info(f"ended after step {ended.step}: {trained.why}")
    params, extra = store.best_weights or (
        program.evaluation_params(ended.state),
        ended.state.extra,
    )
    return Fitted(
        params=params,
        extra=extra,
        state=ended.state,
        history=trained.history.numbers,
        step=ended.step,
        best=trained.best,
        why=trained.why,
        directory=None,
    )


def _fit_in_directory(
    config: RunConfig,
    directory: Path,
    hooks: Sequence[Observer],
    screen: TextIO | None,
) -> Fitted:
    again = "the same call of jt.fit again"
    outcome = run(config, hooks=hooks, screen=screen, directory=directory, resume_command=again)
    if outcome.status == "failed":
        raise LossError(outcome.why)
    goal = BestMetric.parse(config.checkpoint.best)
    of = outcome.sets.get(goal.set_name, outcome.results) if goal else {}
    which: Literal["newest", "best"] = "best" if of else "newest"
    step, program, state = restore_run(config, directory, which)
    numbers = MetricHistory()
    for row in read_rows(outcome.directory.metrics):
        numbers.row(row.pop("step"), "", row)
    if outcome.numbers:  # the file has no row for a step at which the run was interrupted
        numbers.row(outcome.step, "", outcome.numbers)
    return Fitted(
        params=program.evaluation_params(state),
        extra=state.extra,
        state=state if step == outcome.step else restore_run(config, directory)[2],
        history=numbers.numbers,
        step=outcome.step,
        best=EvaluationResult(step, of[step]) if of else None,
        why=outcome.why,
        directory=directory,
    )
