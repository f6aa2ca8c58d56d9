"""Sections of a run's config: `guard`, `init_from` and `precision`."""

from typing import Annotated, Literal, TypeAlias

import jax.numpy as jnp
from pydantic import AfterValidator, Field

from jtrain.config.configclass import configclass
from jtrain.core.precision.loss_scale import LossScale, Unscaled


def _some(window: tuple[int, int]) -> tuple[int, int]:
    first, stop = window
    if 0 <= first < stop:
        return window
    raise ValueError(
        f"must be the first batch that is left out, counted from 0, and the one after the last; "
        f"found [{first}, {stop}]; write [{max(first, 0)}, {max(first, 0) + 1}] for one batch"
    )


def _above_one(factor: float) -> float:
    if factor == 0 or factor > 1:
        return factor
    raise ValueError(f"must be more than 1, or 0 for no bound, found {factor:g}; write 3")


Window: TypeAlias = Annotated[tuple[int, int], AfterValidator(_some)]
Factor: TypeAlias = Annotated[float, Field(ge=0), AfterValidator(_above_one)]


@configclass
class Spike:
    """Definition of a spike among finite steps."""

    loss: Factor = 0.0
    """A loss above so many times its running mean, 3 say; 0: none is too high."""
    grad_norm: Factor = 0.0
    """A gradient norm above so many times its running mean, 10 say; 0: none is."""
    memory: int = Field(default=100, ge=1)
    """Steps over which the means run. No step is judged before so many were taken."""


@configclass
class _Guard:
    """Fields of every policy."""

    without: tuple[Window, ...] = ()
    """Batches that are left out, as windows [first, stop): [[120, 130]] are ten. Batches count from
    0: while none is left out, step 121 takes batch 120."""


@configclass
class SkipPolicy(_Guard):
    """A step that is not finite changes nothing; the run goes on with the next."""

    kind: Literal["skip"] = "skip"
    """Leave the state as it was, and go on with the next step."""
    window: int = Field(default=50, ge=1)
    """Steps in a row, none of them finite, after which the run stops; in a shorter run all of its
    steps."""
    most: int = Field(default=0, ge=0)
    """Steps skipped of the last `within` after which the run stops; 0: only where none of `window`
    steps in a row was finite."""
    within: int = Field(default=1000, ge=1)
    """Steps over which skipped ones are counted."""


@configclass
class RollbackPolicy(_Guard):
    """Goes back to a checkpoint, leaves out the batches about the bad step, and goes on."""

    kind: Literal["rollback"] = "rollback"
    """Go back to a checkpoint, and on without the batches about the bad step."""
    spike: Spike = Spike()
    """Which finite steps are bad."""
    back: int = Field(default=0, ge=0)
    """Batches before that of the bad step that are left out too."""
    skip: int = Field(default=1, ge=1)
    """Batches that are left out in all: those before, that of the bad step, and what follows."""
    most: int = Field(default=3, ge=0)
    """Times of the last `within` steps that a run goes back; then it stops."""
    within: int = Field(default=1000, ge=1)
    """Steps over which they are counted."""

    def __post_init__(self) -> None:
        if self.skip <= self.back:
            raise ValueError(
                f"skip {self.skip} leaves out {self.skip} batches from {self.back} before the bad "
                f"one on, and so not that one; write skip={self.back + 1} or more"
            )


@configclass
class StopPolicy(_Guard):
    """Ends the run, and says what is known of the bad step."""

    kind: Literal["stop"] = "stop"
    """End the run."""
    spike: Spike = Spike()
    """Which finite steps are bad."""


Guard: TypeAlias = Annotated[SkipPolicy | RollbackPolicy | StopPolicy, Field(discriminator="kind")]


def _as_many_stars(pair: tuple[str, str]) -> tuple[str, str]:
    there, here = (name.count("*") for name in pair)
    if there == here:
        return pair
    raise ValueError(
        f"must have as many * in both names, as each stands for the same text; found {there} in "
        f"{pair[0]} and {here} in {pair[1]}"
    )


Pattern = Annotated[str, Field(min_length=1)]
Rename = Annotated[tuple[Pattern, Pattern], AfterValidator(_as_many_stars)]


@configclass
class InitFrom:
    """Trained parameters to start from; the optimizer and the step start afresh.

    Only the first start of a run reads them: one that goes on has all in its own checkpoint.
    """

    path: str = ""
    """A run (its directory, or its NAME in runs/), a checkpoint of one (runs/NAME/checkpoints/400)
    or a file of tensors (.safetensors, .safetensors.index.json); empty: parameters by the seed."""
    step: Literal["newest", "best"] = "newest"
    """Which checkpoint of a run; the best by its own checkpoint.best."""
    include: tuple[Pattern, ...] = ("*",)
    """Patterns on the names of this model's leaves: those that are taken. `*` is any text."""
    exclude: tuple[Pattern, ...] = ()
    """Patterns on the names of this model's leaves: those that are not, and start by the seed."""
    rename: tuple[Rename, ...] = ()
    """Pairs [name there, name here], such as [h/*/ln_1/weight, blocks/*/norm/scale]; of the pairs
    that match a name the first counts. Dots in the names of tensors are slashes."""
    transpose: tuple[Pattern, ...] = ()
    """Patterns on the names of this model's leaves that lie there with their dims reversed."""
    partial: bool = False
    """Whether leaves that are not there start by the seed; otherwise that is an error."""
    extra: bool = False
    """Whether what stands beside the parameters (running statistics) is taken as well; its leaves
    are called extra/NAME."""


@configclass
class F32:
    """Float32 everywhere, wider only for wider parameters."""

    kind: Literal["f32"] = "f32"
    compute = None

    def scale(self) -> Unscaled:
        """Return no scale."""
        return Unscaled()


@configclass
class BF16:
    """Bfloat16 loss; parameters, sums of gradients and the optimizer in float32.

    bfloat16 has the range of float32, so nothing is scaled. Source: Kalamkar et al. 2019,
    https://arxiv.org/abs/1905.12322.
    """

    kind: Literal["bf16"] = "bf16"
    compute = jnp.bfloat16

    def scale(self) -> Unscaled:
        """Return no scale: bfloat16 has the exponents of float32."""
        return Unscaled()


@configclass
class F16:
    """Float16 loss, scaled so that small gradients do not vanish; the rest in float32.

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2; the constants
    are those of TensorFlow's LossScaleOptimizer.
    """

    kind: Literal["f16"] = "f16"
    initial: float = Field(default=2.0**15, gt=0)
    """The factor on the loss at the first step; a power of two rounds nothing."""
    growth: int = Field(default=2000, gt=0)
    """Good steps after which the factor doubles; a gradient that overflows halves it, and the step
    is skipped."""
    minimum: float = Field(default=1.0, gt=0)
    """The factor is not halved below this; an overflow there ends the run."""
    compute = jnp.float16

    def scale(self) -> LossScale:
        """Return the loss scale before the first step."""
        return LossScale.start(self.initial, growth=self.growth, minimum=self.minimum)


Precision: TypeAlias = Annotated[F32 | BF16 | F16, Field(discriminator="kind")]
