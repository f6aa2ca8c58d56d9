"""Which stage of a pipeline computes what and when, and how much of the time none does."""

import dataclasses
from typing import Literal, TypeAlias

from jtrain.errors import ConfigError

Gather: TypeAlias = Literal["turn", "step"]


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Which stage computes what in which turn.

    What enters in turn u is at stage s in turn u + s, and again `stages` turns later if it goes
    round once more.
    """

    stages: int
    batches: int  # microbatches, a multiple of the stages
    repeats: int = 1
    gather: Gather = "turn"  # how often weights that are split over `fsdp` are gathered

    @property
    def groups(self) -> int:
        """Groups of as many microbatches as there are stages."""
        return self.batches // self.stages

    @property
    def turns(self) -> int:
        """How often all stages compute."""
        return self.batches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the turns in which a stage computes nothing of use."""
        return (self.stages - 1) / self.turns

    def __str__(self) -> str:
        often = "" if self.repeats == 1 else f", {self.repeats} times round"
        return (
            f"pipeline: {self.batches} microbatches through {self.stages} stages{often}: "
            f"idle {self.stages - 1} of {self.turns} turns, {self.bubble:.1%}"
        )


def schedule_of(
    stages: int, batches: int, repeats: int, gather: Gather = "turn"
) -> PipelineSchedule | None:
    """The schedule for these values of `Axes`; None where there is one stage.

    Raises:
        ConfigError: if they do not fit together.
    """
    if stages == 1:
        asked = ("stage_batches", batches, 0), ("repeats", repeats, 1), ("gather", gather, "turn")
        for name, value, plain in asked:
            if value != plain:
                raise ConfigError(
                    f"parallel.{name}={value} is of a pipeline, and parallel.stage=1 is none. Set "
                    f"parallel.stage=2 or more, or parallel.{name}={plain}."
                )
        return None
    if batches % stages:
        near = max(round(batches / stages), 1) * stages
        raise ConfigError(
            f"parallel.stage_batches={batches} microbatches enter in groups of parallel.stage="
            f"{stages}, which does not divide them. Nearest: parallel.stage_batches={near}."
        )
    return PipelineSchedule(stages, batches or stages, repeats, gather)
