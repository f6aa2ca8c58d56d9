"""Experiments: the config that every run has, the functions that it builds, and their shapes."""

import abc
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import jax
import optax
from jaxtyping import Array, Shaped
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.dump import leaves
from jtrain.config.durations import Duration
from jtrain.config.precision import F32, FP8, Precision
from jtrain.config.top import BaseConfig, Cadence
from jtrain.core.batches import Batches, FiniteBatches
from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.placement import Placement
from jtrain.core.types import Batch, Dims, Extra, Key, LossFn, Params, RowsInteract
from jtrain.data.batches.workers import Workers
from jtrain.errors import ConfigError, DataError
from jtrain.errors.user_code import check_takes, user_code
from jtrain.finetune.lora import (
    InitExtra,
    Lora,
    LowRankAdapter,
    adapted,
    adapted_init_extra,
    adapted_loss,
    adapted_model,
    build_adapter,
)
from jtrain.losses.metrics import Metric
from jtrain.models.model_loss import ModelLoss
from jtrain.optim import Optimizer
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.transformations import differentiate_only
from jtrain.parallel import Mirrored, Parallel
from jtrain.train import fit_data
from jtrain.train.eight_bits import quantize
from jtrain.train.fit_arguments import build_loss, build_start
from jtrain.train.fit_data import build_evaluation_sets, build_train_batches, split_validation
from jtrain.train.stages import stage_problems
from jtrain.train.trackers import Tracker

BuildOptimizer: TypeAlias = Callable[[int], optax.GradientTransformation]
Pictures: TypeAlias = Shaped[Array, "b h w c"]


class GeneratedMetrics(Protocol):
    """Metrics of texts that a model generates."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics."""
        ...

    def __call__(self, params: Params, extra: Extra, /) -> Mapping[str, float]:
        """Return the metrics by name."""
        ...


@dataclasses.dataclass(frozen=True)
class _AdaptedMetrics:
    adapter: LowRankAdapter
    inner: GeneratedMetrics

    @property
    def metrics(self) -> Sequence[str]:
        return self.inner.metrics

    def __call__(self, params: Params, extra: Extra, /) -> Mapping[str, float]:
        return self.inner(self.adapter.join(params, extra, merged=True), extra["rest"])


@configclass
class Prompt:
    """Prompt of a text, and how it is continued."""

    text: str = ""
    """Beginning of the text; empty: one of the experiment's own."""
    tokens: int = Field(default=400, ge=0)
    """Tokens drawn after the beginning."""
    temperature: float = Field(default=0.8, ge=0)
    """Divisor of the logits: below 1 favours likely tokens; 0 takes the likeliest."""
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens to draw from; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the likeliest tokens to draw from; 1: all."""


@configclass
class SampleConfig:
    """Text that the model writes while it trains: in samples.txt, the log and the trackers."""

    every: Cadence = 0
    """Steps between texts; 0: only at the end, where the experiment has a sample of its own."""
    prompt: str = ""
    """Beginning of the text; empty: one of the experiment's own."""
    tokens: int = Field(default=400, ge=0)
    """Tokens drawn after the beginning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Pure functions, batches and an optimizer, bound to no device."""

    loss: LossFn | Stateful
    """`(params, batch, rng)`, as `make_step` takes it, or all else that `jt.fit` takes."""
    train: Batches | fit_data.Data
    """Training batches; rows, such as `(x, y)`, are shuffled by the config's seed, `batch` a
    step."""
    init: Callable[[Key], tuple[Params, Extra]] | tuple[Params, Extra] | None = None
    """`(params, extra)`, or a function that makes them of a key; `extra` is `()` where nothing is
    carried beside the parameters."""
    net: Any = None
    """In place of `init`, the second argument of `jt.fit`: an nnx module, a Model, or parameters.
    A loss that is made from a model, `jt.classifier(net)`, also gives `model`, `dims` and
    `predict`; with an nnx module a loss of your own takes `(module, batch, rng)`, and `predict`
    takes `(module, batch)`."""
    metrics: Sequence[str | Metric] = ()
    """Further metrics of a loss that is made from a model, as `jt.fit` takes them."""
    class_weight: Mapping[int, float] | None = None
    """How often a row of each label counts in training, as `jt.fit` takes it."""
    optimizer: OptimizerConfig | optax.GradientTransformation | BuildOptimizer | None = None
    """The config of an optimizer, an optax transformation, or a function that makes one of the
    number of steps of the run; None: the `optimizer` of the config."""
    init_extra: InitExtra | None = None
    """`(params, extra, rows) -> extra`, which makes the state of the loss from the parameters that
    the run begins with, loaded ones where it loads some, and the number of rows of a batch."""
    valid: FiniteBatches | Mapping[str, FiniteBatches] | fit_data.Data = None
    """Validation set, evaluated in full and without dropout, as batches or as rows; several sets by
    name, the first of which is the main one; a fraction of `train`'s rows, 0.2; or None."""
    dims: Mapping[str, Dims] = dataclasses.field(default_factory=dict)
    """Names of the dims of parameters (`Model.dims`): rules map them to the axes of a mesh. A
    parameter without names is split along its largest dim."""
    rows_interact: RowsInteract = cast(RowsInteract, "")
    """Whether the loss of a row depends on other rows; see `make_step`. Empty: as the layers of the
    model, of which the loss is built or which is given here (batch norm: "batch"), else "never"."""
    tokens: int = 0
    """Tokens in a row, for the speed that is logged; 0 counts rows."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer; a run is resumed and used with no other."""
    model: Model | None = None
    """The model, for `jt.load(RUN).model`."""
    predict: Callable[[Params, Extra, Batch], Any] | None = None
    """Prediction for each row of a batch, without dropout: a pytree of arrays b ...; used by
    `jt.load(RUN).predict` and `jtrain predict`."""
    sample: Callable[[Params, Extra, Key], str] | None = None
    """A text that shows what the model has learned."""
    complete: Callable[[Params, Extra, Key, Prompt], str] | None = None
    """The text of a prompt and its continuation; used by `jtrain sample`."""
    pictures: Callable[[Params, Extra, Key], Mapping[str, Pictures]] | None = None
    """Images that show what the model has learned, by name, b h w c: bytes 0 .. 255 of 1, 3 or 4
    channels. They are written to pictures/NAME-STEP.png of the run's directory."""
    generated: Mapping[str, GeneratedMetrics] = dataclasses.field(default_factory=dict)
    """Metrics of texts that the model generates, by the name of the set whose evaluation has them,
    `valid` where there is one: `jtrain.train.AnswerEvaluation`."""

    adapter: LowRankAdapter | None = None
    """LoRA of the model, where the config has `lora`; the run adds it."""

    @property
    def initial(self) -> Callable[[Key], tuple[Params, Extra]] | tuple[Params, Extra]:
        """The initial parameters and extra of a built experiment, or what makes them of a key."""
        assert self.init is not None, "build_experiment takes them from `net`"
        return self.init

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer of an experiment whose run has a number of steps."""
        assert isinstance(self.optimizer, optax.GradientTransformation), "resolve durations first"
        return self.optimizer

    def __post_init__(self):
        if isinstance(self.loss, Stateful):
            check_takes(self.loss.loss, ("params", "extra", "batch", "rng"), "the loss")
        else:
            check_takes(self.loss, ("params", "batch", "rng"), "the loss")
        if (self.init is None) == (self.net is None):
            raise ConfigError(
                "jt.Experiment needs either net= or init=: net=net with an nnx module or a model, "
                "as jt.fit takes it, or init=(params, ()), or a function of a key."
            )
        if not self.rows_interact and self.net is None:
            of = self.loss if isinstance(self.loss, ModelLoss) else self.model
            object.__setattr__(self, "rows_interact", (of and of.rows_interact) or "never")
        object.__setattr__(self, "loss", _hashable_loss(self.loss))
        if callable(self.init):
            check_takes(self.init, ("key",), "init")
        if self.init_extra is not None:
            check_takes(self.init_extra, ("params", "extra", "rows"), "init_extra")


def _hashable_loss(loss: LossFn | Stateful) -> LossFn | Stateful:
    """Return the loss, by which what is made of it is cached, as something that has a hash.

    A method of a module that holds arrays has none, nor an object of a plain dataclass.
    """
    try:
        hash(loss)
        return loss
    except TypeError:
        if isinstance(loss, Stateful):
            inner = loss.loss
            return dataclasses.replace(loss, loss=lambda *given: inner(*given))
        return lambda *given: loss(*given)


@configclass
class RunConfig(BaseConfig, abc.ABC):
    """Config of any run; an experiment's Config adds its data and model, and builds them."""

    optimizer: Optimizer
    """Update rule of the parameters."""
    precision: Precision = F32()
    """Type that the loss computes in; parameters, sums and the optimizer stay in float32."""
    parallel: Parallel = Mirrored()
    """Strategy over devices. It changes no result."""
    lora: Lora = Lora()
    """Low-rank terms that are trained in the place of the model's weights."""
    workers: Workers = Workers()
    """Workers that read the batches. They change no result."""
    trackers: tuple[Tracker, ...] = ()
    """Services that get the run's metrics, beside its own files."""
    sample: SampleConfig = SampleConfig()
    """Text that the model writes while it trains."""

    def cadences(self) -> dict[str, int | Duration]:
        """Return by its key every cadence at which the state is needed, 0 for none, and `steps`."""
        return {**super().cadences(), "sample.every": self.sample.every}

    def code_root(self) -> Any:
        """Return what the run is made of in code: the class of the config, in the experiment."""
        return type(self)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        yield from stage_problems(self, [field.name for field in dataclasses.fields(RunConfig)])
        if self.lora.rank and not self.lora.on:
            yield "lora.on", "is empty, so nothing would be trained; set lora.on='[\"*\"]'"
        if self.lora.on and not self.lora.rank:
            yield "lora.rank", "is 0, which means no LoRA; set lora.rank=8, or leave lora.on out"
        fp8 = isinstance(self.precision, FP8)
        if fp8 and self.lora.rank:
            why = "is fp8, whose products are of whole kernels, which lora makes sums of two"
            yield "precision.kind", f"{why}; set precision.kind=bf16, or leave lora out"
        if fp8 and getattr(self.parallel, "explicit", False):
            why = "is fp8, whose products are rewritten without the split of their results"
            yield "precision.kind", f"{why}; set precision.kind=bf16, or parallel.explicit=false"

    @abc.abstractmethod
    def build(self, place: Placement) -> Experiment:
        """Return the experiment of this config.

        Args:
            place: the placement that the model names the dims of its arrays to.
        """


def build_experiment(config: RunConfig, place: Placement) -> Experiment:
    """Return the experiment that the config's `build` makes.

    Raises:
        ConfigError: if it is no Experiment.
        CodeError: if `build` fails in the user's own code, or names a missing file.
        DataError: if the data is not what the config says it is.
    """
    with user_code("`build`"), _keys_of_paths(config):
        experiment = config.build(place)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"experiment {config.experiment}: `build` must return a jt.Experiment and returned a "
            f"{type(experiment).__name__}. Write `return jt.Experiment(init=..., loss=..., "
            f"train=..., optimizer=self.optimizer)`."
        )
    experiment = _with_parts(experiment, config)
    if config.lora.rank:
        experiment = with_lora(experiment, config.lora)
    loss, optimizer = experiment.loss, experiment.optimizer
    if isinstance(optimizer, OptimizerConfig) and optimizer.freezes:
        loss = differentiate_only(loss, optimizer.trained)
    loss, rows = quantize(loss, experiment.rows_interact, config.precision, config.microbatches)
    return dataclasses.replace(experiment, loss=loss, rows_interact=rows)


def _predict_of_module(predict: Callable[..., Any], module: Any) -> Callable[..., Any]:
    check_takes(predict, ("module", "batch"), "predict")
    return lambda params, extra, batch: predict(module.module(params, extra, None, False), batch)


def _parts_of_net(x: Experiment) -> dict[str, Any]:
    start = build_start(x.loss, x.net, rows_interact=x.rows_interact or None)
    parts = {"init": start.init, "loss": start.loss, "rows_interact": start.rows_interact}
    if isinstance(x.loss, ModelLoss):
        model, outputs = x.loss.model, x.loss.outputs
        parts |= {"model": model, "dims": x.dims or model.dims, "predict": x.predict or outputs}
    elif x.predict is not None and start.module is not None:
        parts["predict"] = _predict_of_module(x.predict, start.module)
    return parts


def _with_parts(x: Experiment, config: RunConfig) -> Experiment:
    """Return the experiment with `net` and rows of data, which `jt.fit` takes too, as its parts."""
    loss = build_loss(x.loss, x.metrics, x.class_weight)
    x = dataclasses.replace(x, loss=loss, metrics=(), class_weight=None)
    parts = {} if x.net is None else _parts_of_net(x)
    train, valid = split_validation(x.train, x.valid)
    return dataclasses.replace(
        x,
        **parts,
        net=None,
        train=(
            train
            if isinstance(train, Batches)
            else build_train_batches(train, config.batch, seed=config.seed)
        ),
        valid=build_evaluation_sets(valid, config.evaluate.batch or config.batch),
        optimizer=x.optimizer or config.optimizer,
    )


@contextlib.contextmanager
def _keys_of_paths(config: RunConfig) -> Iterator[None]:
    """Name the key of a path, `data.path=`, in an error of data, which knows only `path=`."""
    try:
        yield
    except DataError as error:
        message = str(error)
        for keys, value in leaves(config).items():
            paths = value if isinstance(value, list) else [value]
            if keys[-1] == "path" and any(x and message.startswith(f"{x}") for x in paths):
                error.args = (re.sub(r"(?<![\w.])path=", f"{'.'.join(keys)}=", message),)
        raise


def with_lora(x: Experiment, settings: Lora) -> Experiment:
    """Return the experiment that trains low-rank terms beside the model's frozen weights.

    Raises:
        ConfigError: if the settings do not suit the model.
    """
    with user_code("init"):
        params, _ = (
            jax.eval_shape(x.initial, jax.random.key(0)) if callable(x.initial) else x.initial
        )
    linear = x.model.linear if x.model else {}
    adapter = build_adapter(settings, params, x.dims, linear)
    return dataclasses.replace(
        x,
        loss=adapted_loss(adapter, x.loss),
        init_extra=adapted_init_extra(x.init_extra),
        dims=adapter.dims(x.dims),
        adapter=adapter,
        model=x.model and adapted_model(adapter, x.model),
        predict=adapted(adapter, x.predict),
        sample=adapted(adapter, x.sample),
        complete=adapted(adapter, x.complete),
        pictures=adapted(adapter, x.pictures),
        generated={name: _AdaptedMetrics(adapter, one) for name, one in x.generated.items()},
    )


def shapes(batches: Any, *, parts: int = 1, part: tuple[int, int] | None = None) -> Batch:
    """Return the shapes and dtypes of a batch, or of one of `parts` slices of it.

    Args:
        part: index and number of the shard of rows that is read to find the shapes
            (`Strategy.part`); by default this process's of all processes.

    Raises:
        DataError: if an array of the batch is a number, which no row has.
    """
    own = batches.shard(*part or (jax.process_index(), jax.process_count()))
    return batch_shapes(own[0], batches.size // parts)


def batch_shapes(batch: Batch, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a batch of this kind with so many rows.

    Raises:
        DataError: if an array of the batch is a number, which no row has.
    """
    for name, array in batch.items():
        if not array.shape:
            raise DataError(
                f"`{name}` of a batch is one number, and every array has a value for each row: "
                f"repeat it by `np.full(rows, {name})`."
            )
    of = lambda array: jax.ShapeDtypeStruct(
        (rows, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype)
    )
    return {name: of(array) for name, array in batch.items()}
