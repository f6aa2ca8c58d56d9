"""Result of `jt.run`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jtrain.train.hooks.evaluation import Results
from jtrain.train.run_dir import RunDir

Status: TypeAlias = Literal["done", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run."""

    directory: RunDir
    status: Status
    step: int
    """Last step that it took."""
    checkpoint: int | None
    """Step of the newest checkpoint; `run` resumes from it. None: there is none."""
    why: str
    sets: Mapping[str, Results]
    """Metrics by set and step of evaluation; the main set first."""
    sample: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the last step; empty where this call took no step."""
    lost: Sequence[str] = ()
    """Files of the run that were removed or truncated by others; a complete run fails for it."""

    @property
    def results(self) -> Results:
        """Metrics of the main set by step; empty if there is no set."""
        return next(iter(self.sets.values()), {})
