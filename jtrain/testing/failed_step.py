"""A failed step under a split, with everything that a diagnosis needs."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jtrain.core.types import Batch
from jtrain.testing.case import LossCase
from jtrain.testing.result import Cause, StepResult

MATCH = 1e-4  # relative tolerance of an explanation: above rounding, below the difference


@dataclasses.dataclass(frozen=True)
class FailedSplit:
    """The result of a step under a split, the expected result, and experiments on the step."""

    case: LossCase
    batch: Batch
    actual: StepResult
    expected: StepResult
    start: dict  # the state before the step, as in StepResult
    parts: Sequence[Batch]  # as the step split the batch; one if it did not
    noun: str  # microbatch, device
    tolerance: float
    distance_without_draws: Callable[[], float]  # distance of both results with all draws fixed
    scale_loss: Callable[
        [float], tuple[StepResult, StepResult]
    ]  # both results, for the loss times a factor
    explain_time: Callable[[], Cause | None]  # the fault along a split sequence

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self.parts)

    @property
    def nouns(self) -> str:
        """Plural of the noun."""
        return "microbatches" if self.noun == "microbatch" else f"{self.noun}s"


def is_near(actual: float, value: float | int) -> bool:
    """Return whether a number agrees with the one that an explanation predicts."""
    return bool(math.isfinite(value) and abs(actual - value) <= MATCH * max(abs(value), 1e-12))
