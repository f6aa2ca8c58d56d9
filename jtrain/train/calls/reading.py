"""Batches of the calls of a run, read ahead and put on the devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.data.batches.step_batches import StackedBatches
from jtrain.data.batches.workers import Workers
from jtrain.errors import ConfigError
from jtrain.train.calls.schedule import CallSchedule

Observe: TypeAlias = Callable[[int, Sequence[Batch]], None]


def read_calls(
    calls: StackedBatches,
    schedule: CallSchedule,
    workers: Workers,
    start: int,
    place: Callable[[Batch], Batch],
    observers: Sequence[Observe] = (),
) -> ReadAhead[Batch]:
    """Return the batches of each call after step `start`, on the devices; close it after use.

    Args:
        place: puts the batches of a call on the devices.
        observers: called with the step before each call and the batches of its steps.

    Raises:
        ConfigError: if `start` lies within a call that cannot be shorter.
    """
    most = schedule.most
    if start % most and not schedule.varies:
        raise ConfigError(
            f"the run resumes from step {start}, which is no multiple of steps_per_call, {most}. "
            f"Set steps_per_call=auto, or steps_per_call=1."
        )
    read, close = functools.partial(read_call, calls, schedule), lambda: None
    if not schedule.varies:  # several workers read calls of one length alone, by their number
        reader = workers.build(calls.__getitem__, start=start // most, stop=schedule.stop // most)
        read, close = (lambda step: reader(step // most)), reader.close

    def get(step: int) -> Batch:
        batch = read(step)
        steps = split_steps(batch, schedule.varies or most > 1) if observers else []
        for observe in observers:
            observe(step, steps)
        return place(batch)

    return ReadAhead(get, start=start, stop=schedule.stop, after=schedule.after, close=close)


def read_call(calls: StackedBatches, schedule: CallSchedule, first: int) -> Batch:
    """Return the batches of the call that begins after step `first`, as numpy arrays."""
    if schedule.varies:
        return calls.read(first, schedule.steps(first))
    return calls[first // schedule.most]


def split_steps(batch: Mapping[str, Any], stacked: bool) -> list[Mapping[str, Any]]:
    """Return the batch of each step of a call."""
    if not stacked:
        return [batch]
    count = len(next(iter(batch.values())))
    return [{name: x[i] for name, x in batch.items()} for i in range(count)]
