"""Checkpoint ownership: the run that a checkpoint belongs to."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Identity of a run: a random id from its start, sealed into its checkpoints."""

    run: str
    """The id."""
    ancestors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Ids of the runs that this run was copied from, each with its last copied step."""

    def owns(self, run: str, step: int) -> bool:
        """Return whether a checkpoint of a step, sealed by the run `run`, belongs to this run.

        A checkpoint without an id (written before ids existed) belongs to every run.
        """
        return not run or run == self.run or step <= self.ancestors.get(run, -1)

    def fault(self, run: str, step: int) -> str:
        """Describe a checkpoint of another run; empty if it belongs to this run."""
        if self.owns(run, step):
            return ""
        copied = " after the copy" if run in self.ancestors else ""
        return f"is a checkpoint of another run ({run}{copied}), and this run is {self.run}"
