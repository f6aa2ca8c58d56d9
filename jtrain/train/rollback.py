"""Rollback: the step that a run resumes from, and the batches that it skips from there.

A decision to skip batches is a line in events.jsonl, which is on the disk before anything is
deleted. All else follows from it: a checkpoint that took those batches without knowing of the
decision is deleted. So a rollback is a decision followed by an ordinary resume, and a process that
dies between the two resumes at the same place.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.checkpoint import CheckpointManager
from jtrain.core.loop import Rollback
from jtrain.data.batches.step_batches import Window, find_batch, merge_windows
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError
from jtrain.io.log import LOG
from jtrain.train.call_schedule import CallBatches, CallSchedule
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.bad_step_log import BadStep, read_decisions
from jtrain.train.hooks.bad_steps import BadSteps
from jtrain.train.longer_run import LengthChange, find_length_changes
from jtrain.train.program import Program
from jtrain.train.run_dir import RunDir


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Step that a run starts or resumes from, and what differs from there on."""

    start: int | None
    """Step of its checkpoint; None for a new run."""
    batches: CallBatches
    """Batches of each call, without those to be skipped, restored to the step."""
    earlier: Sequence[int] = ()
    """Bad steps after which the run rolled back."""
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """State of its guard at the checkpoint."""
    extended: Sequence[LengthChange] = ()
    """Changes of its length so far, the one at this step last."""

    @property
    def schedule(self) -> CallSchedule:
        """Steps of each call."""
        return self.batches.schedule


def find_resume_point(
    program: Program, schedule: CallSchedule, directory: RunDir, checkpoints: CheckpointManager
) -> ResumePoint:
    """Return where a run resumes, with its data at that place. Every process calls this.

    Raises:
        ConfigError: if guard.without names batches that the run has taken.
    """
    config = program.resolved.config
    asked = config.guard.without
    found = broadcast_from_first(lambda: _agree(asked, directory, checkpoints))
    start = checkpoints.resume()
    about = {} if start is None else checkpoints.about(start)
    _check_stages(config, start or 0, about)
    windows = merge_windows(map(_window, [*asked, *found["windows"], *about.get("without", [])]))
    batches = program.batches(schedule, windows)
    batches.train.restore(about.get("batches", {}))
    return ResumePoint(
        start=start,
        batches=batches,
        earlier=found["steps"],
        known=about.get("guard", {}),
        extended=[] if start is None else find_length_changes(config, start, about),
    )


def _check_stages(config: RunConfig, start: int, about: Mapping[str, Any]) -> None:
    """Raise unless stages end where they did: a call's steps may have moved an end."""
    stored = about.get("config", {}).get("stages", [])
    for number, (then, now) in enumerate(zip(stored, config.stages, strict=False)):
        if then["until"] != now.until:
            raise ConfigError(
                f"stages.{number} ended with step {then['until']} in the first {start} steps of "
                f"the run, and ends with step {now.until} here, as steps_per_call is "
                f"{config.steps_per_call}. Resume with the steps_per_call of that run."
            )


def record_rollback(batches: CallBatches, bad_steps: BadSteps, why: Rollback) -> None:
    """Record the batches that are skipped from now on."""
    first = max(0, batches.train.number(why.step - 1) - why.back)
    window = [first, first + why.skip]
    bad = bad_steps.bad or BadStep(why.step, why.why, math.nan, math.nan)
    bad_steps.log.append(bad, "rolled back", without=window)
    LOG.warning(f"{why.why} Rolling back; batches {first} to {window[1] - 1} are skipped.")


def apply_decisions(config: RunConfig, directory: RunDir) -> RunConfig:
    """Return the config with the run's own decisions added to `guard.without`."""
    windows = [*config.guard.without, *(each.window for each in read_decisions(directory.events))]
    guard = dataclasses.replace(config.guard, without=merge_windows(windows))
    return dataclasses.replace(config, guard=guard)


def _agree(asked: Sequence[Window], directory: RunDir, checkpoints: CheckpointManager) -> dict:
    """Return the decisions so far, after deleting checkpoints that contradict one."""
    decided = read_decisions(directory.events)
    for step in reversed(checkpoints.steps() if decided or asked else []):
        try:
            known = merge_windows(map(_window, checkpoints.about(step).get("without", [])))
        except CheckpointError:  # damaged, which whoever resumes finds too
            continue
        if _took(step, known, [each.window for each in decided]):
            checkpoints.remove(step)
        elif windows := _took(step, known, asked):
            first, stop = windows[0]
            raise ConfigError(
                f"guard.without names the window [{first}, {stop}], and checkpoint {step} was "
                f"trained on batches of it, which cannot be unlearned. Roll back by hand: jtrain "
                f"ckpt rm {directory.checkpoints / str(step)}, or start a new run with name=..."
            )
    windows = [list(each.window) for each in decided]
    return {"windows": windows, "steps": [each.step for each in decided]}


def _took(step: int, known: Sequence[Window], windows: Sequence[Window]) -> list[Window]:
    taken = find_batch(step, known)  # and what is before it, outside of the known windows
    first_new = lambda a: next((stop for first, stop in known if first <= a < stop), a)
    return [(a, b) for a, b in windows if first_new(a) < min(b, taken)]


def _window(pair: Sequence[int]) -> Window:
    return pair[0], pair[1]
