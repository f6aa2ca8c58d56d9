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


def find_finished(
    run_dir: RunDir, matched: MatchedConfig[RunConfig], processes: int
) -> tuple[RunResult | None, list[str]]:
    """Return the result of a run that is finished, or a line that says why it must resume.

    Every process calls this, before JAX has started the devices.
    """
    facts, config = run_dir.facts(), matched.config
    if facts.get("status") != "done" or _has_more_to_do(matched):
        return None, []
    step, owner = facts.get("step"), run_dir.owner()
    checkpoints = CheckpointManager(run_dir.checkpoints, first=run_dir.first, owner=owner)
    checkpoints.remove_leftovers()

    def find_fault() -> dict[str, str]:
        steps = config.steps if isinstance(config.steps, int) else facts.get("steps", step)
        if step != steps and not facts.get("why"):
            return {"fault": f"of {steps}, and nothing explains why it should have ended there"}
        if step is None or not checkpoints.is_valid(step):
            return {"fault": "of which the checkpoint is damaged or missing"}
        return {"fault": ""}

    # A single process does not start the devices for it.
    found = broadcast_from_first(find_fault) if processes > 1 else find_fault()
    if step is None or found["fault"]:
        return None, [f"was done at step {step}, {found['fault']}"]
    results = {name: read_results(run_dir.metrics, name) for name in facts.get("sets", ["valid"])}
    return RunResult(run_dir, "done", step, step, FINISHED, results), []


def _has_more_to_do(matched: MatchedConfig[RunConfig]) -> bool:
    """Return whether a finished run may have more steps to take by its config of now."""
    config, stored = matched.config, matched.stored
    if stored is None:
        return False
    return config.evaluate.patience != stored.evaluate.patience or not matched.is_as_long
