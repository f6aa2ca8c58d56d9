"""Where a run goes on, and without which batches: after a bad step, or a kill in the midst of it.

A decision to leave batches out is a line in events.jsonl, which is on the disk before anything is
thrown away. All else follows from it: a checkpoint that took those batches, and does not know of
the decision, is of a run that is no more. So to go back is to decide, and then to begin as any run
that goes on: what dies between the two begins there too.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.checkpoint import CheckpointManager
from jtrain.core.loop import Rollback
from jtrain.data.batches.skip import Window, merged, number_of
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError
from jtrain.train.bad_step_policy import BadStepPolicy
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStep, decisions
from jtrain.train.longer_run import LengthChange, changes
from jtrain.train.run_dir import RunDir
from jtrain.train.setup import TrainSetup


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """What a run begins from."""

    start: int | None
    """The step of its checkpoint; None at its beginning."""
    parts: TrainSetup
    """That leave out what is to be left out."""
    earlier: Sequence[int]
    """The bad steps for which it went back."""
    known: Mapping[str, Any]
    """What its guard knew at the checkpoint."""
    rows: Mapping[str, Mapping[str, Any]]
    """What its files were at the checkpoint."""
    extended: Sequence[LengthChange]
    """The changes of its length so far, the one at this step last."""


def resume_point(
    parts: TrainSetup, directory: RunDir, checkpoints: CheckpointManager
) -> ResumePoint:
    """Where a run goes on, its data at that place. Every process of the run calls this.

    Raises:
        ConfigError: if guard.without names batches that the run has taken.
    """
    asked = parts.config.guard.without
    found = broadcast_from_first(lambda: _agree(asked, directory, checkpoints))
    if found["taken"]:
        raise ConfigError(found["taken"])
    start = checkpoints.resume()
    about = {} if start is None else checkpoints.about(start)
    windows = merged(map(_window, [*asked, *found["windows"], *about.get("without", [])]))
    parts = parts.without(windows)
    parts.calls.restore(about.get("batches", {}))
    extended = [] if start is None else changes(parts.config, start, about)
    return ResumePoint(
        start, parts, found["steps"], about.get("guard", {}), about.get("rows", {}), extended
    )


def decide_rollback(parts: TrainSetup, guarded: BadStepPolicy, why: Rollback) -> str:
    """Writes down what is left out from now on; a line that says it."""
    first = max(0, parts.train.number(why.step - 1) - why.back)
    window = [first, first + why.skip]
    bad = guarded.bad or BadStep(why.step, why.why, math.nan, math.nan)
    guarded.wrote(bad, "rolled back", without=window)
    return f"{why.why} Going back, and on without batches {first} to {window[1] - 1}."


def apply_decisions(config: RunConfig, directory: RunDir) -> RunConfig:
    """The same values, and in `guard.without` what the run has decided to leave out too."""
    windows = [*config.guard.without, *(each.window for each in decisions(directory.events))]
    guard = dataclasses.replace(config.guard, without=merged(windows))
    return dataclasses.replace(config, guard=guard)


def _agree(asked: Sequence[Window], directory: RunDir, checkpoints: CheckpointManager) -> dict:
    """The decisions so far; checkpoints that stand against one are gone. In the first process."""
    apply_decisions = decisions(directory.events)
    for step in reversed(checkpoints.steps() if apply_decisions or asked else []):
        try:
            known = merged(map(_window, checkpoints.about(step).get("without", [])))
        except CheckpointError:  # damaged, which whoever resumes finds too
            continue
        if _took(step, known, [each.window for each in apply_decisions]):
            checkpoints.remove(step)
        elif windows := _took(step, known, asked):
            first, stop = windows[0]
            return {
                "taken": f"guard.without names the window [{first}, {stop}], and checkpoint {step} "
                f"was trained on batches of it: what was learned is not unlearned. Go back by "
                f"hand: jtrain ckpt rm {directory.checkpoints / str(step)}, or start a new run "
                f"with name=..."
            }
    windows = [list(each.window) for each in apply_decisions]
    return {"taken": "", "windows": windows, "steps": [each.step for each in apply_decisions]}


def _took(step: int, known: Sequence[Window], windows: Sequence[Window]) -> list[Window]:
    """The windows of which a checkpoint of a step may have taken a batch."""
    apart = lambda a, b: any(first <= a and b <= stop for first, stop in known)
    return [(a, b) for a, b in windows if not apart(a, b) and number_of(step, known) > a]


def _window(pair: Sequence[int]) -> Window:
    return pair[0], pair[1]
