"""Schedules one after the other."""

from itertools import accumulate
from typing import Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.durations import DurationField
from jtrain.errors import ConfigError
from jtrain.optim.schedules.base import ScheduleBase
from jtrain.optim.schedules.constant import Constant
from jtrain.optim.schedules.cosine import Cosine
from jtrain.optim.schedules.inverse_sqrt import InverseSquareRoot
from jtrain.optim.schedules.linear import LinearSchedule
from jtrain.optim.schedules.one_cycle import OneCycle
from jtrain.optim.schedules.rate import LearningRate, check_run
from jtrain.optim.schedules.restarts import Restarts
from jtrain.optim.schedules.wsd import WarmupStableDecay

Plain: TypeAlias = Annotated[
    Constant
    | LinearSchedule
    | Cosine
    | WarmupStableDecay
    | InverseSquareRoot
    | OneCycle
    | Restarts,
    Field(discriminator="kind"),
]


@configclass
class SchedulePiece:
    """A schedule for a part of a run."""

    steps: Annotated[int, DurationField(0, "%")] = 0
    """How long it lasts, or 1 epoch, 20%, 5 minutes; 0, in one piece at most, takes the steps that
    the others leave."""
    peak: float = Field(default=1.0, gt=0)
    """Its peak, as a share of the optimizer's learning rate."""
    schedule: Plain = Field(default_factory=Constant)
    """How the rate goes over these steps, counted from the piece's first."""


@configclass
class Join(ScheduleBase):
    """Pieces one after the other, which together are as long as the run."""

    kind: Literal["join"] = "join"
    pieces: tuple[SchedulePiece, ...] = Field(min_length=1)
    """Each with its length, its peak and its schedule."""

    def rate(self, peak: float, steps: int) -> LearningRate:
        """The rate at each step of a schedule of `steps`; past its end the last piece goes on.

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
            each = [rate(step - start) for rate, start in zip(rates, starts, strict=True)]
            begun = [step >= start for start in reversed(starts)]
            return jnp.select(begun, each[::-1], each[0])

        return learning_rate

    def _rate(self, number: int, peak: float, length: int) -> LearningRate:
        piece = self.pieces[number]
        try:
            return piece.schedule.build(peak * piece.peak, length)
        except ConfigError as error:  # which speaks of a whole run
            here = f"optimizer.schedule.pieces[{number}]"
            told = str(error).replace("optimizer.schedule", f"{here}.schedule")
            raise ConfigError(f"{here}: {told}") from error

    def _lengths(self, steps: int) -> list[int]:
        said = [piece.steps for piece in self.pieces]
        left, open_ends = steps - sum(said), said.count(0)
        if open_ends > 1:
            at = [i for i, length in enumerate(said) if not length]
            raise ConfigError(
                f"optimizer.schedule.pieces: {open_ends} of {len(said)} say no length, and one may "
                f"take what the others leave: give pieces[{at[1]}] its steps."
            )
        if left < 0 or (left > 0) != (open_ends == 1):
            told = " + ".join(str(length) for length in said if length)
            whole = f"{told} = {sum(said)}" if len(said) - open_ends > 1 else told
            fill = "the last piece steps: 0 to take what is left" if not open_ends else "fewer"
            raise ConfigError(
                f"optimizer.schedule.pieces last {whole} steps{' and more' * open_ends}, and the "
                f"run has {steps}: set steps={sum(said) + open_ends}, or give {fill}."
            )
        return [length or left for length in said]
