"""A step whose second computation differs ends the run before its state is saved."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_study import at_home, kept, trained, write_study

from jtrain.errors import DeviceError
from jtrain.train.hooks.recompute_check import RecomputeCheck

COPIED = NamedSharding(Mesh(np.array(jax.devices()), "data"), P())


@jax.jit
def plain(state, batch):
    return jax.tree.map(lambda x: x * 2 + batch, state), {}


def flipped(wrong: int):
    """Return the step; its `wrong`-th call flips a bit of device 5's replica."""
    calls = 0

    def step(state, batch):
        nonlocal calls
        calls += 1
        state, metrics = plain(state, batch)
        if calls == wrong:
            parts = [np.array(shard.data) for shard in state["w"].addressable_shards]
            parts[5].view(np.uint32)[3] ^= 1
            devices = [shard.device for shard in state["w"].addressable_shards]
            arrays = [jax.device_put(*pair) for pair in zip(parts, devices, strict=True)]
            w = jax.make_array_from_single_device_arrays((8,), COPIED, arrays)
            state = {**state, "w": w}
        return state, metrics

    return step


def run(step, *, every: int, steps: int) -> RecomputeCheck:
    twice = RecomputeCheck(every=every)
    taken = twice.wrap(step)
    state = jax.device_put({"w": np.arange(8, dtype=np.float32), "b": np.float32(1)}, COPIED)
    for number in range(1, steps + 1):
        state, metrics = taken(state, jax.device_put(np.float32(number), COPIED))
        twice.on_state(number, state, metrics)
    twice.settle()
    return twice


@pytest.mark.parametrize("wrong", [3, 4], ids=["the one that is gone on with", "the other"])
def test_one_bit_of_one_device(wrong):
    with pytest.raises(DeviceError, match=r"step 3 was computed twice .* in w, on cpu:5 of"):
        run(flipped(wrong), every=3, steps=6)


def test_a_step_between_is_not_looked_at():
    run(flipped(2), every=3, steps=6)


@pytest.mark.slow
def test_a_thousand_steps_without_an_alarm():
    run(plain, every=1, steps=1000)


@pytest.mark.slow
def test_a_run_that_computes_twice_is_the_same_run(tmp_path, monkeypatch, compiled):
    path = write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    once = trained(path, "name=once")
    twice = trained(path, "name=twice", "checks.recompute=2")
    assert kept(once) == kept(twice)
