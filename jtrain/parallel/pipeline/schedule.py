"""Schedule of a pipeline: turns, stages and idle time."""

import dataclasses
from typing import Literal, TypeAlias

from jtrain.errors import ConfigError

Gather: TypeAlias = Literal["turn", "step"]


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Schedule of a pipeline.

    A microbatch that enters in turn u is at stage s in turn u + s, and again `stages` turns later
    for each repeat.
    """

    stages: int
    batches: int  # microbatches, a multiple of the stages
    repeats: int = 1
    gather: Gather = "turn"  # how often weights split over `fsdp` are gathered

    @property
    def groups(self) -> int:
        """Groups of as many microbatches as there are stages."""
        return self.batches // self.stages

    @property
    def turns(self) -> int:
        """Number of turns."""
        return self.batches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of idle turns."""
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
    """Return the schedule for these values of `Axes`; None for one stage.

    Raises:
        ConfigError: if the values do not match.
    """
    if stages == 1:
        settings = (
            ("stage_batches", batches, 0),
            ("repeats", repeats, 1),
            ("gather", gather, "turn"),
        )
        for name, value, default in settings:
            if value != default:
                raise ConfigError(
                    f"parallel.{name}={value} needs a pipeline, and parallel.stage=1 is none. Set "
                    f"parallel.stage=2 or more, or parallel.{name}={default}."
                )
        return None
    if batches % stages:
        near = max(round(batches / stages), 1) * stages
        raise ConfigError(
            f"parallel.stage_batches={batches} microbatches enter in groups of parallel.stage="
            f"{stages}, which does not divide them. Nearest: parallel.stage_batches={near}."
        )
    return PipelineSchedule(stages, batches or stages, repeats, gather)
