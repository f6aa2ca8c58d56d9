"""`parallel.kind: auto` takes the first layout that fits, and says what was too large."""

from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.core.state import new_state
from jtrain.errors import ConfigError, ShardingError
from jtrain.parallel import Auto, Axes, MemoryNeeds
from jtrain.parallel.strategies.auto import estimate

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


def test_says_what_it_takes_and_what_was_too_large():
    assert chosen(4).why == (
        "auto: fsdp 8, zero 3, about 0.00311 GB a device (state 0.00159, copies 0.000528, saved "
        "0.001, passing 0) of 0.004; too large, in GB: data 8 0.0179, fsdp 8, zero 1 0.0105"
    )


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
    found = chosen(20, rows=1).layout  # 12 heads are no multiple of 8
    assert (found.tensor, found.context) == (4, 2)


def test_experts_are_on_devices_of_their_own():
    found = chosen(20, dims={"up": ("experts", "hidden")}, rows=8).layout  # 512 of them
    assert (found.data, found.expert) == (1, 8)


def test_rows_that_divide_into_nothing_are_refused():
    with pytest.raises(ConfigError, match="3 rows of a microbatch divide into no layout of 8"):
        chosen(20, rows=3, tokens=0)


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
    layout = Axes(
        min_size=4096, zero=zero, **({"data": 8, "fsdp": 1} if zero == 0 else {"fsdp": 8})
    )
    where = layout.build(jax.devices())
    counted = estimate(layout, needs()).state
    assert counted == sum(of.bytes for of in where.decisions(needs().state, DIMS))


@pytest.mark.thorough
def test_a_run_takes_the_steps_of_one_device_and_says_its_layout(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    params = {"w": np.zeros((8, 1), np.float32)}

    def loss(params, batch, rng):
        return jt.Mean.of(
            jax.numpy.sum((batch["x"] @ params["w"] - batch["y"]) ** 2, -1), batch["mask"]
        )

    data = {"x": x, "y": x.sum(axis=1, keepdims=True)}
    fit = lambda **how: jt.fit(loss, params, data, steps=5, batch=16, **how)
    several, alone = fit(parallel="auto", directory=tmp_path / "run"), fit(parallel="single")
    assert_close(several.params["w"], alone.params["w"], 1e-6)
    assert "auto: data 8, about " in (tmp_path / "run" / "log.txt").read_text()
    with pytest.raises(ConfigError, match='Write parallel="mirrored"'):
        jt.predict(lambda params, batch: batch["x"], params, data, parallel=cast(Any, "auto"))
