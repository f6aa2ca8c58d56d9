"""State that is too large: the first layout that fits it, and offload to the host's memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from comparison import assert_close, bitwise
from quick_study import at_home, config_of, kept, trained, write_study

import jtrain as jt
from jtrain.core.state import new_state
from jtrain.errors import ConfigError, ShardingError
from jtrain.parallel import Auto, Axes, MemoryNeeds, Mirrored
from jtrain.parallel.strategies.auto import estimate
from jtrain.train.program import Program, set_up

DIMS = {"up": ("width", "hidden"), "q": ("width", "heads", None), "table": ("vocab", "width")}


def needs(**changed) -> MemoryNeeds:
    """Make the needs of 1,056,768 parameters: 4.2 MB, and 8.5 MB of Adam's moments."""
    make = lambda shape: jax.numpy.zeros(shape)
    params = {"up": (512, 1024), "q": (512, 12, 64), "table": (272, 512)}
    state = jax.eval_shape(
        lambda: new_state(
            {name: make(shape) for name, shape in params.items()},
            optax.adam(1e-3),
            jax.random.key(0),
        )
    )
    given = {"rows": 64, "microbatches": 1, "tokens": 64, "compute": None, "saved": 8_000_000}
    return MemoryNeeds(**{"state": state, "dims": DIMS, **given, **changed})


def chosen(memory: float, devices: int = 8, check=lambda layout: None, **changed) -> Any:
    """Choose the layout for a memory in MB a device."""
    auto = Auto(memory=memory / 1e3)
    return auto.choose(needs(**changed), jax.devices()[:devices], check)


@pytest.mark.parametrize(
    ("megabytes", "layout"),
    [
        (20, {"data": 8, "fsdp": 1, "zero": 0}),
        (11, {"fsdp": 8, "zero": 1}),
        (4, {"fsdp": 8, "zero": 3}),
    ],
)
def test_splits_as_much_of_the_state_as_the_memory_asks_for(megabytes, layout):
    found = chosen(megabytes)
    assert {name: getattr(found.layout, name) for name in layout} == layout
    assert found.layout.build(jax.devices()).axes


@pytest.mark.thorough
def test_gradients_are_split_only_where_microbatches_are_summed():
    layouts: list[int] = []
    for megabytes in np.arange(24, 3, -0.25):
        found = chosen(megabytes, microbatches=4, saved=1_000_000).layout
        layouts += [found.zero] if found.zero not in layouts else []
    assert layouts == [0, 1, 2, 3]


def test_fewer_rows_than_devices_are_split_by_what_the_model_names():
    found = chosen(20, rows=4).layout
    assert (found.tensor, found.sequence) == (2, True)
    assert chosen(20, rows=4, dims={}).layout.context == 2  # nothing for tensor to split


def test_heads_stay_whole():
    found = chosen(20, rows=1).layout  # 12 heads are not a multiple of 8
    assert (found.tensor, found.context) == (4, 2)


def test_experts_are_on_devices_of_their_own():
    found = chosen(20, dims={"up": ("experts", "hidden")}, rows=8).layout  # 512 of them
    assert (found.data, found.expert) == (1, 8)


def test_what_does_not_suit_the_model_is_passed_over_and_said():
    def check(layout: Axes) -> None:
        if layout.tensor > 1:
            raise ShardingError("no dim can use tensor. Take another.")

    found = chosen(20, check=check, rows=4)
    assert (found.layout.tensor, found.layout.context) == (1, 2)
    assert found.why.endswith("not taken: no dim can use tensor")


def test_where_nothing_fits_the_least_is_taken_and_said():
    found = chosen(0.001)
    assert found.layout.zero == 3
    assert "the least of all: it may not fit" in found.why


@pytest.mark.parametrize("zero", [1, 3])
def test_the_state_it_counts_is_what_lies_there(zero):
    over = {"data": 8, "fsdp": 1} if zero == 0 else {"fsdp": 8}
    layout = Axes(min_size=4096, zero=zero, **over)
    where = layout.build(jax.devices())
    counted = estimate(layout, needs()).state
    assert counted == sum(of.bytes for of in where.decisions(needs().state, DIMS))


@pytest.mark.thorough
def test_a_run_takes_the_steps_of_one_device_and_says_its_layout(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    params = {"w": np.zeros((8, 1), np.float32)}

    def loss(params, batch, rng):
        errors = batch["x"] @ params["w"] - batch["y"]
        return jt.Mean.of(jax.numpy.sum(errors**2, -1), batch["mask"])

    data = {"x": x, "y": x.sum(axis=1, keepdims=True)}
    fit = lambda **how: jt.fit(loss, params, data, steps=5, batch=16, **how)
    several, alone = fit(parallel="auto", directory=tmp_path / "run"), fit(parallel="single")
    assert_close(several.params["w"], alone.params["w"], 1e-6)
    assert "auto: data 8, about " in (tmp_path / "run" / "log.txt").read_text()
    with pytest.raises(ConfigError, match='Write parallel="mirrored"'):
        jt.predict(lambda params, batch: batch["x"], params, data, parallel=cast(Any, "auto"))


CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = [
    *("batch=16", "data.context=16", "model.context=16", "model.layers=2", "model.heads=2"),
    *("model.width=32", "model.remat=names", "model.saved=[qkv, attention]", "checkpoint.every=0"),
    "steps_per_call=1",
]


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
        (
            "kind: fsdp, devices: 4, min_size: 0",
            ("params", "opt_state"),
            ("steps_per_call=2", "microbatches=2"),
        ),
        ("kind: mirrored, devices: 4, zero: 1", ("opt_state",), ("steps_per_call=1",)),
    ],
)
def test_offload_changes_no_bit(tmp_path, parallel, offload, more):
    path, values = write_study(tmp_path), f"parallel={{{parallel}, offload: "
    parts, near = (
        set_up(config_of(path, [*more, "checkpoint.every=0", f"{values}[{', '.join(parts)}]}}"]))
        for parts in (offload, ())
    )
    got, want = walked(parts), walked(near)
    assert bitwise(got[:2], want[:2])
    assert got[2] == want[2]
    where = {part: {"pinned_host"} if part in offload else {"device"} for part in kinds(got[0])}
    assert kinds(got[0]) == where
    assert kinds(want[0]) == {"params": {"device"}, "opt_state": {"device"}}


@pytest.mark.thorough
def test_what_a_block_saves_goes_to_the_host():
    here, there = (
        set_up(config_of(CONFIGS / "shakespeare.yaml", [*MODEL, layout])).lower_step().as_text()
        for layout in ("parallel.kind=fsdp", "parallel={kind: fsdp, offload: [activations]}")
    )
    assert here.count("annotate_device_placement") == 0
    assert (
        there.count("annotate_device_placement") >= 2 * 2 * 2
    )  # of two blocks two names, there and back


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

    for values in (far, near, far):
        split = trained(path, values, "name=split", hooks=[pause])
    assert steps == list(range(1, 13))
    host, device = ({part: {kind} for part in there[0]} for kind in ("pinned_host", "device"))
    assert there == [host] * 4 + [device] * 4 + [host] * 4
    assert kept(split) == kept(trained(path, near, "name=plain"))


@pytest.mark.thorough
def test_averages_are_computed_on_the_devices(tmp_path):
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
