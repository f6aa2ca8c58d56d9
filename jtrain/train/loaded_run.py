"""A trained run, loaded to be used: its parameters, its model, and predictions by it."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jtrain.config.resolve import resolve
from jtrain.core.batches import FiniteBatches
from jtrain.core.jaxpr import dependence
from jtrain.core.model import Model
from jtrain.core.precision.cast import cast_params
from jtrain.core.pytree import at_least_f32, num_elements
from jtrain.core.types import Batch, Extra, Params
from jtrain.data import Arrays, InOrder
from jtrain.data.sources.row_shapes import check_rows
from jtrain.errors import ConfigError, DataError
from jtrain.models.model_loss import ModelLoss
from jtrain.parallel import Mirrored, Parallel, Strategy, check_divides
from jtrain.train import fit_arguments
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.experiment import Experiment, RunConfig
from jtrain.train.experiment_shapes import shapes
from jtrain.train.find_run import find_run
from jtrain.train.fit_weights import is_of_fit, read_weights
from jtrain.train.predict import ROWS, compile_rows, outputs_of, over_rows
from jtrain.train.restore_run import trained
from jtrain.train.setup import TrainSetup

Outputs = Callable[[tuple[Params, Extra], Batch], Any]
ADDED = {"row", "mask"}  # by what makes batches of rows


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LoadedRun:
    """A step of a run: `jt.load`."""

    directory: Path
    """Of the run."""
    step: int
    """The step of its checkpoint."""
    params: Params
    """The parameters to use: the average, with an optimizer that keeps one."""
    extra: Extra
    """What is carried beside them."""
    config: RunConfig | None
    """Its values; None of a run that `jt.fit` made."""
    experiment: Experiment | None
    """What was trained; None of a run that `jt.fit` made, whose code is in a script."""
    _parts: TrainSetup | None
    _strategy: Strategy

    def __repr__(self) -> str:
        leaves = len(jax.tree.leaves(self.params))
        of = self.config.experiment if self.config else "jt.fit"
        return (
            f"LoadedRun({self.directory} at step {self.step}: {of}, {num_elements(self.params):,} "
            f"parameters in {leaves} leaves)"
        )

    @property
    def model(self) -> Model | None:
        """The experiment's model, `init` and `apply`; None where the experiment gives none."""
        return self.experiment.model if self.experiment else None

    @functools.cached_property
    def inputs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The shape and the dtype of each array that `predict` takes, by name, of a single row.

        Raises:
            ConfigError: if the experiment gives no `predict`.
        """
        outputs, parts = self._outputs(None), self._parts
        assert parts is not None, "where there is a predict, there is an experiment"
        rows = next(iter(parts.sets.values()), parts.experiment.train)
        batch = shapes(rows, part=self._strategy.part)
        weights = jax.eval_shape(lambda: (self.params, self.extra))
        needed = set().union(*dependence(outputs, weights, batch))
        first = len(jax.tree.leaves(weights))
        names = [name for i, name in enumerate(sorted(batch), first) if i in needed]
        of_row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return {name: of_row(batch[name]) for name in names if name not in ADDED}

    def predict(
        self,
        data: fit_arguments.Data,
        apply: Callable[[Params, Batch], Any] | ModelLoss | None = None,
        *,
        batch: int = 0,
    ) -> Any:  # a pytree of numpy arrays, each n ...
        """Return what the run makes of each row of `data`, in the order of the data.

        Computed in the run's precision, without dropout, on all devices of the layout. What is
        compiled is kept for the next call of as many rows a batch.

        Args:
            data: arrays by the names in `inputs`, the array itself where there is one input, a
                source of rows, or batches that go over the data once.
            apply: in place of the experiment's `predict`: `(params, batch) -> outputs`, or a loss
                that was made of a model, `jt.classifier(model)`, for what the model gives.
            batch: rows at a time, over all devices; 0: 128.

        Raises:
            ConfigError: if the experiment gives no `predict` and `apply` is not given.
            DataError: if the data has not what the run takes.
        """
        outputs, strategy = self._outputs(apply), self._strategy
        size = batch or -(-ROWS // strategy.shares) * strategy.shares
        rows = fit_arguments.once(data if apply else self._checked(data, size), size)
        check_divides(rows.size, strategy.shares, 1)
        weights = self.params, self.extra
        example = strategy.place(rows.shard(*strategy.part)[0])
        kind = apply, repr({n: (x.shape, x.dtype) for n, x in example.items()})
        if kind not in self._programs:
            self._programs[kind] = compile_rows(strategy, outputs, weights, example)
        return over_rows(self._programs[kind], strategy, weights, rows)

    def _outputs(self, apply: Callable[[Params, Batch], Any] | ModelLoss | None) -> Outputs:
        """The outputs of a batch, of parameters and extra."""
        x = self.experiment
        if apply is not None:
            return outputs_of(apply)
        if x is None:
            raise ConfigError(
                f"{self.directory} was made by jt.fit, and what its model computes is in a script. "
                f"Give it: predict(data, apply), with apply(params, batch), or predict(data, "
                f"jt.classifier(model)), of the model that was trained."
            )
        predict = x.predict
        if predict is None:
            raise ConfigError(
                f"experiment {self._name} gives no `predict`. Give it one: jt.Experiment(..., "
                f"predict=lambda params, extra, batch: outputs), or predict(data, apply)."
            )
        dtype = self.config.precision.compute if self.config else None

        def outputs(weights: tuple[Params, Extra], batch: Batch) -> Any:
            return at_least_f32(predict(cast_params(weights[0], dtype), weights[1], batch))

        return outputs

    def _checked(self, data: fit_arguments.Data, size: int) -> FiniteBatches:
        """The data in batches, once its rows were seen to be such as the run takes."""
        inputs = self.inputs
        if hasattr(data, "shape") or isinstance(data, list):
            if len(inputs) != 1:
                raise DataError(
                    f"A single array was given, and {self._name} takes {', '.join(inputs)}: give "
                    f"arrays by name, {{{', '.join(f'{n!r}: ...' for n in inputs)}}}."
                )
            data = {next(iter(inputs)): data}
        if isinstance(data, Mapping):
            found = {name: np.asarray(array) for name, array in data.items() if name not in ADDED}
            return InOrder(Arrays(**check_rows(found, inputs, self._name)), size=size)
        rows = fit_arguments.once(data, size)
        seen = {name: array for name, array in rows[0].items() if name not in ADDED}
        check_rows(seen, inputs, self._name)
        return rows

    @property
    def _name(self) -> str:
        return self.config.experiment if self.config else str(self.directory)

    @functools.cached_property
    def _programs(self) -> dict[Any, Callable]:
        return {}


def load(
    run: Path | str,
    step: int | Literal["newest", "best"] = "newest",
    *,
    parallel: str | Parallel | None = None,
) -> LoadedRun:
    """Load a run that was trained, by its directory or its name in runs/, to use it.

    ```python
    run = jt.load("digits", "best")
    run.predict({"image": images})["label"]
    ```

    Its experiment is built as for training, so its data has to be there. Of a run that `jt.fit`
    made it gives the parameters, in dicts and lists by the names of the leaves; the model is in
    your script.

    Args:
        step: of a checkpoint, the newest, or the best by the run's checkpoint.best.
        parallel: how it is laid out, a name or a value; by default as in training, or as the
            devices that are there allow.

    Raises:
        ConfigError: if there is no such run.
        CheckpointError: if it has no such checkpoint.
    """
    path = find_run(run, "jt.load")
    if is_of_fit(path):
        return load_fit(path, step, parallel or "mirrored")
    config = resolve(path / "config.yaml").config
    if parallel is not None:
        config = dataclasses.replace(config, parallel=fit_arguments.strategy(parallel))
    return load_run(config, path, step)


def load_run(
    config: RunConfig,
    directory: Path,
    step: int | Literal["newest", "best"] = "newest",
    tell: Callable[[str], None] = functools.partial(print, file=sys.stderr),
) -> LoadedRun:
    """Load the run in a directory, of these values; see `load`.

    Args:
        tell: takes a line where its layout does not fit the devices.
    """
    layout = config.parallel
    if isinstance(layout, Mirrored) and layout.impl != "jit":  # whose copies sum, and rows do not
        config = dataclasses.replace(config, parallel=dataclasses.replace(layout, impl="jit"))
    found, parts, state = trained(config, directory, step, tell)
    return LoadedRun(
        directory=directory,
        step=found,
        params=parts.evaluation_params(state),
        extra=state.extra,
        config=config,
        experiment=parts.experiment,
        _parts=parts,
        _strategy=parts.strategy,
    )


def load_fit(
    directory: Path, step: int | Literal["newest", "best"], parallel: str | Parallel
) -> LoadedRun:
    """Load a run that `jt.fit` made, from its checkpoint alone; see `load`."""
    keep_compiled_programs()
    found, params, extra = read_weights(directory, step)
    strategy = fit_arguments.layout(parallel).build()
    params, extra = jax.device_put((params, extra), strategy.shardings((params, extra)))
    return LoadedRun(
        directory=directory,
        step=found,
        params=params,
        extra=extra,
        config=None,
        experiment=None,
        _parts=None,
        _strategy=strategy,
    )
