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
    """Factor above the running mean from which a loss is a spike, for example 3; 0: none is."""
    grad_norm: Factor = 0.0
    """Factor above the running mean from which a gradient norm is a spike, for example 10; 0: none
    is."""
    memory: int = Field(default=100, ge=1)
    """Length of the running means in steps. The first steps of that number are never spikes."""


@configclass
class _Guard:
    """Fields of every policy."""

    without: tuple[Window, ...] = ()
    """Batches to leave out, as windows [first, stop): [[120, 130]] is ten batches. Batches are
    numbered from 0: while none is left out, step 121 takes batch 120."""


@configclass
class SkipPolicy(_Guard):
    """Policy that skips steps that are not finite."""

    kind: Literal["skip"] = "skip"
    """Leave the state unchanged, and continue with the next step."""
    window: int = Field(default=50, ge=1)
    """Number of consecutive skipped steps after which the run stops; a shorter run stops if all of
    its steps are skipped."""
    most: int = Field(default=0, ge=0)
    """Number of skipped steps among the last `within` after which the run stops; 0: no limit but
    `window`."""
    within: int = Field(default=1000, ge=1)
    """Steps over which skipped ones are counted."""


@configclass
class RollbackPolicy(_Guard):
    """Policy that resumes from a checkpoint without the batches around the bad step."""

    kind: Literal["rollback"] = "rollback"
    """Resume from the last checkpoint, without the batches around the bad step."""
    spike: Spike = Spike()
    """Finite steps that are bad too."""
    back: int = Field(default=0, ge=0)
    """Number of batches to leave out before the batch of the bad step."""
    skip: int = Field(default=1, ge=1)
    """Number of batches to leave out in all: `back`, the batch of the bad step, and those after."""
    most: int = Field(default=3, ge=0)
    """Number of rollbacks within `within` steps; at the next bad step the run stops."""
    within: int = Field(default=1000, ge=1)
    """Steps over which rollbacks are counted."""

    def __post_init__(self) -> None:
        if self.skip <= self.back:
            raise ValueError(
                f"skip {self.skip} leaves out {self.skip} batches from {self.back} before the bad "
                f"one on, and so not that one; write skip={self.back + 1} or more"
            )


@configclass
class StopPolicy(_Guard):
    """Policy that ends the run with a report of the bad step."""

    kind: Literal["stop"] = "stop"
    """End the run."""
    spike: Spike = Spike()
    """Finite steps that are bad too."""


Guard: TypeAlias = Annotated[SkipPolicy | RollbackPolicy | StopPolicy, Field(discriminator="kind")]
