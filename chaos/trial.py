"""Trial: the result of one injected fault."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trial:
    """One fault, and the result of the promise; the seed repeats the trial."""

    name: str
    """Name of the fault: `worker_kill`."""
    seed: int
    """All random choices follow from it: the moment, the process, the signal."""
    passed: bool
    seconds: float
    """Duration of the trial."""
    detail: str
    """The observations, with numbers; after a failure, the expectation too."""

    def __str__(self) -> str:
        """Return a line of a report."""
        how = "passed" if self.passed else "FAILED"
        return f"{self.name} seed {self.seed}: {how} in {self.seconds:.1f} s: {self.detail}"
