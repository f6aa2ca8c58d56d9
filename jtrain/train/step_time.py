"""How long a step takes, measured once, and a run whose durations in time are counted by it."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.core.loop import train_loop
from jtrain.data import ReadAhead
from jtrain.data.batches.stacked import StackedBatches
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup, set_up
from jtrain.train.train_loop import compile_step

WARMUP, LEAST, MOST = 3, 20, 2000  # calls of the step; between the last two, as fit in SECONDS
SECONDS, LIMIT = 1.5, 15.0  # to measure in; even fewer calls than LEAST, not to take longer


def paced(config: RunConfig, seconds: float = 0.0) -> TrainSetup:
    """The parts of a run, in which durations in time are the steps that take so long here.

    Args:
        seconds: that a step takes, as it was measured before; 0: it is measured, if asked for.

    Raises:
        UserError: as `set_up` and the compilation of a step.
    """
    setup = set_up(config, seconds)
    return setup.at_pace(seconds_per_step(setup)) if setup.lengths.provisional else setup


def seconds_per_step(parts: TrainSetup) -> float:
    """Seconds that a step takes, data and all, the same in all processes.

    The run's own program trains a state of its own, which is thrown away.
    """
    step, state = compile_step(parts, parts.fresh)
    each = parts.config.steps_per_call
    last = parts.config.steps // each
    reader = parts.config.workers.build(_Again(parts.calls, last), start=0, stop=None)
    read = lambda call: parts.place(reader(call))
    feed = ReadAhead(read, start=0, stop=None, close=reader.close)

    def timed(calls: int) -> float:
        nonlocal state
        began = time.perf_counter()
        stop = calls * each
        state = train_loop(step, state, feed, start=0, stop=stop, steps_per_call=each).state
        return _agreed((time.perf_counter() - began) / calls)

    try:
        timed(WARMUP)
        roughly = timed(WARMUP)
        calls = min(max(math.ceil(SECONDS / roughly), LEAST), MOST)
        return timed(max(min(calls, int(LIMIT / roughly)), WARMUP)) / each
    finally:
        feed.close()


class _Again:
    """The calls of a run, from the first again after the last; can be sent to another process."""

    def __init__(self, calls: StackedBatches, last: int):
        self._calls, self._last = calls, last

    def __call__(self, call: int) -> Mapping[str, Any]:
        return self._calls[call % self._last]


def _agreed(seconds: float) -> float:
    """What the first process measured."""
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))
