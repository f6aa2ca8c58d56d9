"""Each step is a heartbeat, and so is each wait for data."""

import itertools

from jtrain.core.loop import train_loop
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat
from jtrain.train.hooks.function_hooks import HeartbeatHook
from jtrain.train.hooks.signals import Signals


def test_each_step_is_reported_after_it_started():
    pulse, seen = Heartbeat(), []

    def step(state, batch):
        seen.append((pulse.now().phase, pulse.now().step))
        return state + 1, {}

    train_loop(step, 0, itertools.repeat({}), start=4, stop=7, hooks=[HeartbeatHook(pulse=pulse)])
    assert seen == [("start", 0), ("hooks", 5), ("hooks", 6)]
    assert (pulse.now().phase, pulse.now().step) == ("hooks", 7)


def test_a_wait_for_data_is_reported_and_the_phase_after_it():
    waited = []

    def batches():
        for _ in range(3):
            waited.append(HEARTBEAT.now().phase)
            yield {}

    went_on = [HEARTBEAT.now().phase for _ in Signals().through(batches(), "eval")]
    assert waited == ["data"] * 3
    assert went_on == ["eval"] * 3
