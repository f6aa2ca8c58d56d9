"""Result of `jt.run`, of this run or of a finished one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from jtrain.checkpoint import CheckpointManager
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import Results
from jtrain.train.hooks.log import read_results
from jtrain.train.resume import MatchedConfig
from jtrain.train.run_dir import RunDir

FINISHED = "the run had already finished; nothing was trained"
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

    @property
    def results(self) -> Results:
        """Metrics of the main set by step; empty if there is no set."""
        return next(iter(self.sets.values()), {})


def find_finished(run_dir: RunDir, matched: MatchedConfig[RunConfig]) -> RunResult | None:
    """Return the result of a run that has no more steps to take; None if it must resume.

    Every process calls this, before JAX has started the devices.
    """
    facts, config, stored = run_dir.facts(), matched.config, matched.stored
    step, owner = facts.get("step"), run_dir.owner()
    if facts.get("status") != "done" or step is None:
        return None
    if stored and (config.evaluate.patience != stored.evaluate.patience or not matched.is_as_long):
        return None
    steps = config.steps if isinstance(config.steps, int) else facts.get("steps", step)
    if step != steps and not facts.get("why"):  # nothing explains why it should have ended there
        return None
    checkpoints = CheckpointManager(run_dir.checkpoints, first=run_dir.first, owner=owner)
    checkpoints.remove_leftovers()
    if not broadcast_from_first(lambda: {"valid": checkpoints.is_valid(step)})["valid"]:
        return None
    results = {name: read_results(run_dir.metrics, name) for name in facts.get("sets", ["valid"])}
    return RunResult(run_dir, "done", step, step, FINISHED, results)
