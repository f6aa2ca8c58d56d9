"""What is trained: the values every experiment takes, and the pure functions it gives."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import optax
from jaxtyping import Array, Shaped
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.precision import F32, Precision
from jtrain.config.top import BaseConfig
from jtrain.core.batches import Batches, FiniteBatches
from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.placement import Placement
from jtrain.core.types import Batch, Couples, Dims, Extra, Key, LossFn, Params
from jtrain.data.batches.workers import Workers
from jtrain.errors import ConfigError
from jtrain.errors.user_code import check_takes, user_code
from jtrain.optim import Optimizer
from jtrain.optim.recipe import OptimizerConfig
from jtrain.parallel import Mirrored, Parallel
from jtrain.train.trackers import Tracker

BuildOptimizer: TypeAlias = Callable[[int], optax.GradientTransformation]
Pictures: TypeAlias = Shaped[Array, "b h w c"]


@configclass
class Prompt:
    """What a text begins with, and how it goes on."""

    text: str = ""
    """The beginning; empty: one of the experiment's own."""
    tokens: int = Field(default=400, ge=0)
    """Tokens drawn after it."""
    temperature: float = Field(default=0.8, ge=0)
    """What the logits are divided by: below 1 likelier tokens, above 1 stranger ones; 0 takes the
    likeliest."""
    top_k: int = Field(default=0, ge=0)
    """Only so many of the likeliest tokens are drawn from; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest whose chances add up to this are drawn from; 1: all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Pure functions, batches and an optimizer; no device is named."""

    init: Callable[[Key], tuple[Params, Extra]] | tuple[Params, Extra]
    """The parameters and what is carried beside them, `()` where there is nothing: what makes them
    of a key, or themselves."""
    loss: LossFn | Stateful
    train: Batches
    optimizer: OptimizerConfig | optax.GradientTransformation | BuildOptimizer
    """The config of an optimizer (`self.optimizer`), an optax transformation, or a function that
    makes one of the number of steps of the run."""
    valid: FiniteBatches | Mapping[str, FiniteBatches] | None = None
    """What it is judged by, the whole of it at each evaluation, without dropout; several sets by
    name, of which the first is what it is mostly judged by."""
    dims: Mapping[str, Dims] = dataclasses.field(default_factory=dict)
    """The names of the dims of parameters, by the parameters' own (`Model.dims`): rules map them
    to the axes of a mesh. A parameter that is not there is split by its largest dim."""
    couples: Couples = "nothing"
    """Whether the loss makes rows meet; see `make_step`."""
    tokens: int = 0
    """Tokens a row, for the speed that is shown; 0 counts rows."""
    tokenizer: str = ""
    """The fingerprint of what its tokens are by; a run goes on, and is used, with no other."""
    model: Model | None = None
    """The model, for who loads a run: `jt.load(RUN).model`."""
    predict: Callable[[Params, Extra, Batch], Any] | None = None
    """What the model makes of each row of a batch, without dropout: a pytree of arrays b ...;
    `jt.load(RUN).predict` and `jtrain predict` ask for it."""
    sample: Callable[[Params, Extra, Key], str] | None = None
    """A text that shows what the model has learned."""
    complete: Callable[[Params, Extra, Key, Prompt], str] | None = None
    """The text of a prompt and what the model makes of it; `jtrain sample` asks for it."""
    pictures: Callable[[Params, Extra, Key], Mapping[str, Pictures]] | None = None
    """Images that show what the model has learned, of each name b h w c: bytes 0 .. 255 of 1, 3 or
    4 channels. They lie in the run's directory as pictures/NAME-STEP.png."""

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
        if callable(self.init):
            check_takes(self.init, ("key",), "init")


@configclass
class RunConfig(BaseConfig, abc.ABC):
    """The values of any run; an experiment's Config adds its data and its model, and builds."""

    optimizer: Optimizer
    """How the parameters are updated."""
    precision: Precision = F32()
    """The type that the loss computes in; parameters, sums and the optimizer stay in float32."""
    parallel: Parallel = Mirrored()
    """How the work is split over devices. It changes no result."""
    workers: Workers = Workers()
    """Who reads the batches. It changes no result."""
    trackers: tuple[Tracker, ...] = ()
    """Services that the run's numbers are written to, beside its own files."""

    @abc.abstractmethod
    def build(self, place: Placement) -> Experiment:
        """The experiment that these values stand for.

        Args:
            place: what its model names the dims of its arrays to.
        """


def build_experiment(config: RunConfig, place: Placement) -> Experiment:
    """Return what the config's `build` gives.

    Raises:
        ConfigError: if that is no Experiment.
        CodeError: if `build` fails in the user's own code, or names a file that is not there.
        DataError: if the data is not what the config says it is.
    """
    with user_code("`build`"):
        experiment = config.build(place)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"experiment {config.experiment}: `build` is to return a jt.Experiment and returned a "
            f"{type(experiment).__name__}. Write `return jt.Experiment(init=..., loss=..., "
            f"train=..., optimizer=self.optimizer)`."
        )
    return experiment
