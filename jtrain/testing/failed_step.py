"""A step that was split, with all that a diagnosis may ask for."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jtrain.core.types import Batch
from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.result import StepResult

MATCH = 1e-4  # of an explanation: far above rounding, far below what it explains


@dataclasses.dataclass(frozen=True)
class FailedSplit:
    """A result under a split, what it should be, and what the parts give each for itself."""

    of: LossCase
    batch: Batch
    got: StepResult
    want: StepResult
    start: dict  # the state before, as of a Result
    parts: Sequence[Batch]  # as the step split them; one where it did not
    noun: str  # microbatch, device
    tolerance: float
    undrawn: Callable[[], float]  # how far both are apart where nothing is drawn
    times: Callable[[float], tuple[StepResult, StepResult]]  # both, of the loss times a number
    timed: Callable[[], Cause | None]  # what is wrong along a sequence that is split

    @property
    def count(self) -> int:
        """Of parts."""
        return len(self.parts)


def is_near(got: float, value: float | int) -> bool:
    """Whether a number is what an explanation gives."""
    return bool(math.isfinite(value) and abs(got - value) <= MATCH * max(abs(value), 1e-12))
