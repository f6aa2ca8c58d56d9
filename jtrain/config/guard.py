"""Policies for a step that is not finite, or a spike: stop, skip or roll back."""

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from jtrain.config.configclass import configclass


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
