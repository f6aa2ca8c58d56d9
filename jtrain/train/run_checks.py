"""Hooks that check the steps of a run, and the batches that they observe."""

import contextlib
import dataclasses

from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.train.bad_step_policy import BadStepPolicy
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """Hooks that check the steps of a run, and the batches that they observe."""

    record: StepRecorder | None
    """Record of every step, where there is a directory."""
    recompute: RecomputeCheck | None
    """Check that computes some steps twice, if configured."""
    policy: BadStepPolicy
    """Policy for bad steps."""
    feed: ReadAhead[Batch]
    """Batches of the calls."""


def guard(resume: ResumePoint, run_dir: RunDir | None, stack: contextlib.ExitStack) -> Checks:
    """Return the hooks that check each step, and the batches, which they observe.

    Args:
        stack: closes the files of the hooks, and the reader of the batches.
    """
    setup, start = resume.setup, resume.start
    record = None
    if run_dir is not None:
        record = StepRecorder(
            run_dir.steps if run_dir.first else None,
            resumed_at=start,
        )
        stack.callback(record.close)
    recompute = RecomputeCheck.build(
        setup.config.checks.recompute, after=setup.schedule.after, start=start or 0
    )
    policy = BadStepPolicy(setup, run_dir, start=start, earlier=resume.earlier, known=resume.known)
    stack.enter_context(policy)
    observers = [record.observe if record else None, policy.saw]
    feed = setup.read_ahead(start or 0, [observe for observe in observers if observe])
    stack.enter_context(feed)
    return Checks(record=record, recompute=recompute, policy=policy, feed=feed)
