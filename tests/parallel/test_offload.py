"""Offload to the memory of the host: equal to the bit, and restored after each step."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from comparison import bitwise
from quick_study import at_home, config_of, kept, trained, write_study

import jtrain as jt
from jtrain.errors import ShardingError
from jtrain.parallel import Axes, Mirrored
from jtrain.parallel.offload import check_host_memory
from jtrain.train.program import Program, set_up

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = [
    *("batch=16", "data.context=16", "model.context=16", "model.layers=2", "model.heads=2"),
    *("model.width=32", "model.remat=names", "model.saved=[qkv, attention]", "checkpoint.every=0"),
    "steps_per_call=1",
]
ALL = ("params", "opt_state", "activations")


def language(parallel: str, offload: tuple[str, ...], more: tuple[str, ...] = ()) -> Program:
    values = f"parallel={{{parallel}, offload: [{', '.join(offload)}]}}"
    return set_up(config_of(CONFIGS / "shakespeare.yaml", [*MODEL, *more, values]))


def kinds(state) -> dict[str, set[str]]:
    """Return the memory kinds of arrays with dims, by part of the state."""
    of = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}
    return {part: of(getattr(state, part)) for part in ("params", "opt_state")}


def walked(parts: Program):
    """Return the state after two calls, the log and an evaluation; check the memory kinds."""
    state, step, logged = parts.initial_state(), parts.compile_step(), []
    before = kinds(state)
    for call in range(2):
        given = state
        state, metrics = step(given, parts.place(parts.batches().stacked[call]))
        logged.append(metrics["loss"])
        assert kinds(state) == before
        # Given up where it is the same memory; what was copied from the host's is let go of.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.params))
    return state, logged, parts.measure(state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallel", "offload", "more"),
    [
        ("kind: fsdp, devices: 4, min_size: 0", ALL[:2], ("steps_per_call=2", "microbatches=2")),
        ("kind: mirrored, devices: 4, zero: 1", ("opt_state",), ("steps_per_call=1",)),
    ],
)
def test_offload_changes_no_bit(tmp_path, monkeypatch, parallel, offload, more):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path, values = write_study(tmp_path), f"parallel={{{parallel}, offload: "
    parts, near = (
        set_up(config_of(path, [*more, "checkpoint.every=0", f"{values}[{', '.join(parts)}]}}"]))
        for parts in (offload, ())
    )
    same_bits(parts, near, offload)


def same_bits(parts: Program, near: Program, offload: tuple[str, ...]) -> None:
    got, want = walked(parts), walked(near)
    assert bitwise(got[:2], want[:2])
    assert got[2] == want[2]
    where = {part: {"pinned_host"} if part in offload else {"device"} for part in kinds(got[0])}
    assert kinds(got[0]) == where
    assert kinds(want[0]) == {"params": {"device"}, "opt_state": {"device"}}


@pytest.mark.thorough
def test_what_a_block_saves_goes_to_the_host():
    here, there = (
        language("kind: fsdp", offload).lower_step().as_text().count("annotate_device_placement")
        for offload in [(), ("activations",)]
    )
    assert here == 0
    assert there >= 2 * 2 * 2  # of two blocks two names, there and back


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_with_and_without(tmp_path, monkeypatch, compiled):
    """Saved from the host's memory and restored to it, or to the devices'."""
    at_home(tmp_path, monkeypatch, compiled)
    path = write_study(tmp_path)
    fsdp = "kind: fsdp, devices: 4, min_size: 0"
    near, far = f"parallel={{{fsdp}}}", f"parallel={{{fsdp}, offload: [params, opt_state]}}"
    steps, there = [], []

    def pause(step, state):
        steps.append(step)
        there.append(kinds(state))
        return jt.Stop("a pause", "interrupted") if step in (4, 8) else None

    more = ["log.leaves=6", "name=split"]
    for values in (far, near, far):
        split = trained(path, values, *more, hooks=[pause])
    assert steps == list(range(1, 13))
    host, device = ({part: {kind} for part in there[0]} for kind in ("pinned_host", "device"))
    assert there == [host] * 4 + [device] * 4 + [host] * 4
    assert kept(split) == kept(trained(path, near, "log.leaves=6", "name=plain"))


@pytest.mark.thorough
def test_averages_are_computed_on_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = write_study(tmp_path)
    fsdp = "kind: fsdp, devices: 4, min_size: 0"
    near, far = (
        set_up(config_of(path, ["optimizer.ema=0.7", f"parallel={{{fsdp}, offload: [{offload}]}}"]))
        for offload in ("", "params, opt_state")
    )
    weights = [parts.evaluation_params(parts.initial_state()) for parts in (near, far)]
    assert bitwise(*weights)
    assert kinds(SimpleNamespace(params=weights[1], opt_state=()))["params"] == {"device"}


def test_copies_of_the_step_do_not_offload():
    with pytest.raises(ValueError, match=r"parallel\.impl=pmap runs replicas.*parallel\.impl=jit"):
        Mirrored(impl="pmap", offload=("params",))
    assert Mirrored(impl="jit", offload=("params",)).build()


def test_devices_without_host_memory_say_what_to_take():
    memory = SimpleNamespace(kind="device")
    device = SimpleNamespace(device_kind="odd", addressable_memories=lambda: [memory])
    said = (
        r"offload=\[params\].*odd devices reach device and no pinned_host.*parallel\.offload=\[\]"
    )
    with pytest.raises(ShardingError, match=said):
        check_host_memory(device, ("params",))
    check_host_memory(device, ())
    shardings = Axes(offload=("params",)).build().shardings({"params": {"w": jnp.zeros((8, 8))}})
    assert shardings["params"]["w"].memory_kind == "pinned_host"
