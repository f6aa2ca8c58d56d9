"""Checkpoint ownership: which run a checkpoint belongs to."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """A run, by the random id that it was given at its beginning and seals into its checkpoints."""

    run: str
    """The id."""
    ancestors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Ids of the runs that this run was copied from, each with the last step that was copied."""

    def owns(self, run: str, step: int) -> bool:
        """Return whether a checkpoint of a step, sealed by the run with the id `run`, is its own.

        A checkpoint without an id (from before there were ids) belongs to every run.
        """
        return not run or run == self.run or step <= self.ancestors.get(run, -1)

    def fault(self, run: str, step: int) -> str:
        """Return what is wrong with a checkpoint that is not its own; empty if it is."""
        if self.owns(run, step):
            return ""
        copied = " from then on" if run in self.ancestors else ""
        return f"is a checkpoint of another run ({run}{copied}), and this run is {self.run}"
