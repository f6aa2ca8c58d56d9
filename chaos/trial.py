"""What came of hurting a run once."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trial:
    """One fault, and whether the promise held; the seed repeats it."""

    name: str
    """What was done: `worker_kill`."""
    seed: int
    """All that was drawn follows from it: the moment, the process, the signal."""
    passed: bool
    seconds: float
    """That the trial took, all in all."""
    detail: str
    """What was seen, with its numbers; where it failed, what was expected instead."""

    def __str__(self) -> str:
        """A line of a table."""
        how = "passed" if self.passed else "FAILED"
        return f"{self.name} seed {self.seed}: {how} in {self.seconds:.1f} s: {self.detail}"
