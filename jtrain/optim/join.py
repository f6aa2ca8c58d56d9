"""Schedules joined one after the other, and the union of all schedules."""

from itertools import accumulate
from typing import Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.durations import DurationField
from jtrain.config.registry import Registry
from jtrain.errors import ConfigError
from jtrain.optim.schedules import (
    Constant,
    Cosine,
    Exponential,
    InverseSquareRoot,
    LearningRate,
    LinearSchedule,
    OneCycle,
    Restarts,
    ScheduleBase,
    WarmupStableDecay,
    check_run,
)

_Simple: TypeAlias = (
    Constant | LinearSchedule | Cosine | WarmupStableDecay | InverseSquareRoot | OneCycle | Restarts
)
SimpleSchedule: TypeAlias = Annotated[_Simple, Registry("schedules", ScheduleBase, "rate")]


@configclass
class SchedulePiece:
    """A schedule of some steps of a run."""

    steps: Annotated[int, DurationField(0, "%")] = 0
    """Length in steps, or 1 epoch, 20%, 5 minutes; 0, in one piece at most: the remaining steps."""
    peak: float = Field(default=1.0, gt=0)
    """Peak of the piece, as a share of the optimizer's learning rate."""
    schedule: SimpleSchedule = Field(default_factory=Constant)
    """Schedule of these steps, counted from the piece's first."""


@configclass
class Join(ScheduleBase):
    """Pieces one after the other, whose lengths add up to the run."""

    kind: Literal["join"] = "join"
    pieces: tuple[SchedulePiece, ...] = Field(min_length=1)
    """Pieces with their length, peak and schedule."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`; the last piece never ends.

        Raises:
            ConfigError: if the lengths do not fit the run, or a piece's schedule its length.
        """
        check_run(steps)
        lengths = self._lengths(steps)
        starts = [0, *accumulate(lengths)][:-1]
        rates = [self._rate(number, peak, length) for number, length in enumerate(lengths)]

        def learning_rate(step: Any) -> Any:
            if isinstance(step, int):
                piece = sum(step >= start for start in starts) - 1
                return rates[piece](step - starts[piece])
            values = [rate(step - start) for rate, start in zip(rates, starts, strict=True)]
            started = [step >= start for start in reversed(starts)]
            return jnp.select(started, values[::-1], values[0])

        return learning_rate

    def _rate(self, number: int, peak: float, length: int) -> LearningRate:
        piece = self.pieces[number]
        try:
            return piece.schedule.build(peak * piece.peak, length)
        except ConfigError as error:  # the message is about a run
            key = f"optimizer.schedule.pieces[{number}]"
            message = str(error).replace("optimizer.schedule", f"{key}.schedule")
            message = message.replace("(steps=", f"({key}.steps=")
            raise ConfigError(f"{key}: {message}") from error

    def _lengths(self, steps: int) -> list[int]:
        lengths = [piece.steps for piece in self.pieces]
        left, open_ends = steps - sum(lengths), lengths.count(0)
        if open_ends > 1:
            at = [i for i, length in enumerate(lengths) if not length]
            raise ConfigError(
                f"optimizer.schedule.pieces: {open_ends} of {len(lengths)} have no length, and "
                f"only one may take the remaining steps: give pieces[{at[1]}] its steps."
            )
        if left < 0 or (left > 0) != (open_ends == 1):
            terms = " + ".join(str(length) for length in lengths if length)
            total = f"{terms} = {sum(lengths)}" if len(lengths) - open_ends > 1 else terms
            fill = "the last piece steps: 0 for the remaining steps" if not open_ends else "fewer"
            raise ConfigError(
                f"optimizer.schedule.pieces last {total} steps{' and more' * open_ends}, and the "
                f"run has {steps}: set steps={sum(lengths) + open_ends}, or give {fill}."
            )
        return [length or left for length in lengths]


Schedule: TypeAlias = Annotated[
    _Simple | Join | Exponential, Registry("schedules", ScheduleBase, "rate")
]
