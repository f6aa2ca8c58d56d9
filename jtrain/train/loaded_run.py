"""Loaded run: a trained run's parameters, its model, and its predictions."""

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
from jtrain.core.loss_checks import dependence
from jtrain.core.model import Model
from jtrain.core.precision.cast import cast_params
from jtrain.core.pytree import at_least_f32, num_elements
from jtrain.core.types import Batch, Extra, Params
from jtrain.data import Arrays, InOrder
from jtrain.data.sources.row_files import check_rows
from jtrain.errors import ConfigError, DataError
from jtrain.errors.plain_numbers import plain_numbers
from jtrain.finetune.adapter_file import write_adapter
from jtrain.finetune.lora import LowRankAdapter
from jtrain.io.safetensors import SUFFIX
from jtrain.models.model_loss import ModelLoss
from jtrain.parallel import Mirrored, Parallel, Strategy, check_divides
from jtrain.train import fit_arguments, fit_data
from jtrain.train.experiment import Experiment, RunConfig, shapes
from jtrain.train.fit_data import is_fit_run, read_weights, read_weights_file
from jtrain.train.predict import ROWS, compile_rows, make_outputs, predict_rows
from jtrain.train.program import Program
from jtrain.train.restore import restore_run
from jtrain.train.run_dir import find_run
from jtrain.train.runtime import enable_compilation_cache

ADDED = {"row", "mask"}  # added when rows are batched


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LoadedRun:
    """Checkpoint of a run, loaded by `jt.load`."""

    directory: Path
    """Directory of the run."""
    step: int
    """Step of the checkpoint."""
    params: Params
    """Parameters to use; with an optimizer that keeps an average, the average."""
    extra: Extra
    """State of the model beside the parameters."""
    config: RunConfig | None
    """Config of the run; None for a run of `jt.fit`."""
    experiment: Experiment | None
    """Experiment of the run; None for a run of `jt.fit`, whose code is in a script."""
    _program: Program | None
    _strategy: Strategy

    def __repr__(self) -> str:
        leaves = len(jax.tree.leaves(self.params))
        name = self.config.experiment if self.config else "jt.fit"
        return (
            f"LoadedRun({self.directory} at step {self.step}: {name}, "
            f"{num_elements(self.params):,} parameters in {leaves} leaves)"
        )

    @property
    def model(self) -> Model | None:
        """The experiment's model, with `init` and `apply`; None if the experiment has none."""
        return self.experiment.model if self.experiment else None

    @property
    def merged(self) -> Params:
        """Parameters of the model with the adapter of a run with `lora` added; else `params`."""
        if self._adapter is None:
            return self.params
        return self._adapter.join(self.params, self.extra, merged=True)

    def load_into(self, module: Any) -> Any:
        """Return an nnx module like the trained one with its arrays, in evaluation mode.

        Raises:
            LossError: if the module has an array that was not trained.
        """
        from jtrain.models.adapters.nnx import SplitModule  # flax: 0.6 s

        return SplitModule(module).module(self.params, self.extra, None, False)

    def save_adapter(self, path: Path | str) -> int:
        """Write the adapter of a run with `lora` to a .safetensors file; return its bytes.

        Raises:
            ConfigError: if the run has no adapter.
            CheckpointError: if the file cannot be written.
        """
        if self._adapter is None:
            raise ConfigError(
                f"{self.directory} has no adapter: it was trained without lora. For all of its "
                f"parameters: jtrain ckpt export {self.directory} --out {path}"
            )
        return write_adapter(Path(path), self._adapter, self.params, self.extra)

    @property
    def _adapter(self) -> LowRankAdapter | None:
        return self.experiment.adapter if self.experiment else None

    @functools.cached_property
    def inputs(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array that `predict` takes, by name, for a single row.

        Raises:
            ConfigError: if the experiment has no `predict`.
        """
        outputs, program = self.outputs(), self._program
        assert program is not None, "a run with a predict has an experiment"
        rows = next(iter(program.resolved.sets.values()), program.resolved.experiment.train)
        batch = shapes(rows, part=self._strategy.part)
        weights = jax.eval_shape(lambda: (self.params, self.extra))
        needed = set().union(*dependence(outputs, weights, batch))
        first = len(jax.tree.leaves(weights))
        names = [name for i, name in enumerate(sorted(batch), first) if i in needed]
        row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return {name: row(batch[name]) for name in names if name not in ADDED}

    @plain_numbers
    def predict(
        self,
        data: fit_data.Data,
        apply: Callable[[Params, Batch], Any] | ModelLoss | None = None,
        *,
        batch: int = 0,
    ) -> Any:  # a pytree of numpy arrays, each n ...
        """Return the run's prediction for each row of `data`, in the order of the data.

        Predictions are computed in the run's precision, without dropout, on all devices of the
        layout. The compiled program is reused by calls with the same batch size.

        Args:
            data: arrays by the names in `inputs`, the array itself if there is one input, a source
                of rows, or batches that go over the data once.
            apply: replaces the experiment's `predict`: `(params, batch) -> outputs`, or a loss
                built from a model, `jt.classifier(model)`, for the model's outputs.
            batch: rows at a time, over all devices; 0: 128.

        Raises:
            ConfigError: if the experiment has no `predict` and `apply` is not given.
            DataError: if the data does not fit the run's inputs.
        """
        outputs, strategy = self.outputs(apply), self._strategy
        size = batch or -(-ROWS // strategy.shares) * strategy.shares
        rows = fit_data.build_batches(data if apply else self._checked(data, size), size)
        check_divides(rows.size, strategy.shares, 1)
        weights = self.params, self.extra
        example = strategy.place(rows.shard(*strategy.part)[0])
        kind = apply, repr({n: (x.shape, x.dtype) for n, x in example.items()})
        if kind not in self._programs:
            self._programs[kind] = compile_rows(strategy, outputs, weights, example)
        return predict_rows(self._programs[kind], strategy, weights, rows)

    def outputs(
        self, apply: Callable[[Params, Batch], Any] | ModelLoss | None = None
    ) -> Callable[[tuple[Params, Extra], Batch], Any]:
        """Return the function of (params, extra) and a batch that `predict` computes.

        Raises:
            ConfigError: if the experiment has no `predict` and `apply` is not given.
        """
        if apply is not None:
            return make_outputs(apply)
        if self.experiment is None:
            raise ConfigError(
                f"{self.directory} was made by jt.fit, and the code of its model is in a script. "
                f"Give it here: predict(data, apply), with apply(params, batch), or predict(data, "
                f"jt.classifier(model)), with the model that was trained."
            )
        predict = self.experiment.predict
        if predict is None:
            raise ConfigError(
                f"experiment {self._name} has no `predict`. Add one: jt.Experiment(..., "
                f"predict=lambda params, extra, batch: outputs), or call predict(data, apply)."
            )
        dtype = self.config.precision.compute if self.config else None

        def outputs(weights: tuple[Params, Extra], batch: Batch) -> Any:
            return at_least_f32(predict(cast_params(weights[0], dtype), weights[1], batch))

        return outputs

    def _checked(self, data: fit_data.Data, size: int) -> FiniteBatches:
        inputs = self.inputs
        real = lambda rows: {name: np.asarray(x) for name, x in rows.items() if name not in ADDED}
        if hasattr(data, "shape") or isinstance(data, list):
            if len(inputs) != 1:
                raise DataError(
                    f"A single array was given, and {self._name} takes {', '.join(inputs)}: give "
                    f"arrays by name, {{{', '.join(f'{n!r}: ...' for n in inputs)}}}."
                )
            data = {next(iter(inputs)): data}
        if isinstance(data, Mapping):
            return InOrder(Arrays(**check_rows(real(data), inputs, self._name)), size=size)
        rows = fit_data.build_batches(data, size)
        check_rows(real(rows[0]), inputs, self._name)
        return rows

    @property
    def _name(self) -> str:
        return self.config.experiment if self.config else str(self.directory)

    @functools.cached_property
    def _programs(self) -> dict[Any, Callable]:
        return {}


@plain_numbers
def load(
    run: Path | str,
    step: int | Literal["newest", "best"] = "newest",
    *,
    parallel: str | Parallel | None = None,
) -> LoadedRun:
    """Load a trained run, by its directory or its name in runs/, to use it.

    ```python
    run = jt.load("digits", "best")
    run.predict({"image": images})["label"]
    ```

    The experiment is built as for training, so its data must be available. The parameters of a run
    of `jt.fit`, and of a file that its `result.save` wrote, come in the dicts, lists and tuples
    that were trained, a module of another library as a dict; the model is in your script.

    Args:
        step: of a checkpoint, the newest, or the best by the run's checkpoint.best.
        parallel: layout, a name or a value; by default as in training, or as the available devices
            allow.

    Raises:
        ConfigError: if there is no such run.
        CheckpointError: if the run has no such checkpoint.
    """
    is_file = str(run).endswith(SUFFIX)
    path = Path(run) if is_file else find_run(run, "jt.load")
    if not is_file and not is_fit_run(path):
        config = resolve(path / "config.yaml").config
        if parallel is not None:
            config = dataclasses.replace(config, parallel=fit_arguments.build_strategy(parallel))
        return load_run(config, path, step)
    enable_compilation_cache()
    found, params, extra = read_weights_file(path) if is_file else read_weights(path, step)
    strategy = fit_arguments.build_layout(parallel or "mirrored").build()
    params, extra = jax.device_put((params, extra), strategy.shardings((params, extra)))
    return LoadedRun(
        directory=path,
        step=found,
        params=params,
        extra=extra,
        config=None,
        experiment=None,
        _program=None,
        _strategy=strategy,
    )


def load_run(
    config: RunConfig,
    directory: Path,
    step: int | Literal["newest", "best"] = "newest",
    log: Callable[[str], None] = functools.partial(print, file=sys.stderr),
) -> LoadedRun:
    """Load the run in a directory, with these values; see `load`.

    Args:
        log: takes a line if the run's layout does not fit the devices.
    """
    layout = config.parallel
    if isinstance(layout, Mirrored) and layout.impl != "jit":  # replicas sum; rows are not summed
        config = dataclasses.replace(config, parallel=dataclasses.replace(layout, impl="jit"))
    found, program, state = restore_run(config, directory, step, log)
    return LoadedRun(
        directory=directory,
        step=found,
        params=program.evaluation_params(state),
        extra=state.extra,
        config=config,
        experiment=program.resolved.experiment,
        _program=program,
        _strategy=program.resolved.strategy,
    )
