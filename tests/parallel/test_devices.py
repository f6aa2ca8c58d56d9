"""Devices by number, by index and by name: the strategies that run on them, and what is refused."""

import re
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from plain_environ import run_python
from pydantic import ValidationError

import jtrain as jt
from jtrain.errors import ConfigError
from jtrain.parallel import FSDP, Auto, Axes, Mirrored, Single
from jtrain.parallel.chips import find_chip, peak_flops
from jtrain.parallel.devices import devices, one_device, parse_devices

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
BATCH = {"x": X, "y": X.sum(1), "row": np.arange(32, dtype=np.int32), "mask": np.ones(32, bool)}


def loss(params, batch, rng):
    return jt.Mean.of((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


def ids(found) -> list[int]:
    return [device.id for device in found]


def fakes(platform: str, processes: int, each: int) -> list[SimpleNamespace]:
    """Make devices of several processes, to compile for."""
    make = lambda i: SimpleNamespace(
        id=i, process_index=i // each, platform=platform, device_kind="fake"
    )
    return [make(i) for i in range(processes * each)]


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (0, range(8)),
        (3, [0, 1, 2]),
        ((5,), [5]),
        ("cpu", range(8)),
        (("cpu:6", "cpu:3"), [6, 3]),
        ("/device:CPU:1", [1]),
    ],
)
def test_devices_by_number_by_index_and_by_name(asked, got):
    assert ids(devices(asked)) == list(got)


def test_each_process_gives_the_devices_that_were_asked_for():
    there = fakes("gpu", processes=2, each=4)
    assert ids(devices(2, there)) == [0, 1, 4, 5]
    assert ids(devices((0, 2), there)) == [0, 2, 4, 6]
    assert ids(devices("gpu:3", there)) == [3, 7]
    assert ids(devices("gpu", there)) == list(range(8))


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (-1, "must be at least 0, found -1"),
        ((1, "cpu:1"), "must name each device once"),
        ("cpu:", "must name devices, and 'cpu:' is none"),
        (("cpu:0", "gpu:1"), r"must be devices of one platform, found \[cpu:0,gpu:1\]"),
        (1.5, "must say devices, found 1.5"),
    ],
)
def test_what_is_no_device_is_told_before_a_device_is_touched(written, why):
    advice = r"\. Write how many, 0 for all; their indices, such as \[0,2\]; or a platform"
    with pytest.raises(ValueError, match=why) as caught:
        parse_devices(written)
    assert re.search(advice, str(caught.value))
    with pytest.raises(ValidationError, match=why):
        Mirrored(devices=written)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (9, r"parallel.devices=9, and each process has 8 \(cpu\)\. Take parallel.devices=8, or 0"),
        ((0, 8), r"=\[0,8\], and each process has 8 \(cpu\)\. Take .*=0, or indices up to 7"),
        ("gpu:1", r"gpu:1, and JAX reaches no gpu here: it has 8 x cpu \(cpu\)\. Take .*=cpu, or"),
    ],
)
def test_devices_that_are_not_there_say_what_to_take(asked, said):
    with pytest.raises(ConfigError, match=said):
        devices(asked)


def test_one_device_is_the_first_or_the_one_that_is_named():
    assert [one_device(asked).id for asked in (0, 1, (2,), "cpu:5", "cpu")] == [0, 0, 2, 5, 0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("values", "where"),
    [
        (Single(devices="cpu:5"), {5}),
        (Mirrored(devices=(1, 4), impl="pmap"), {1, 4}),
        (FSDP(devices=("cpu:6", "cpu:3"), min_size=0), {3, 6}),
        (Axes(devices=(0, 2, 5, 7), data=2, min_size=0), {0, 2, 5, 7}),
    ],
    ids=["single", "pmap", "fsdp", "sharded"],
)
def test_every_strategy_takes_its_step_on_the_devices_that_were_chosen(values, where):
    strategy, optimizer = values.build(), optax.sgd(0.1)
    new = lambda: jt.new_state({"w": jnp.zeros(4)}, optimizer, jax.random.key(0))
    state = jax.jit(new, out_shardings=strategy.shardings(jax.eval_shape(new)))()
    step = jt.make_step(loss, optimizer, psum=strategy.psum)
    batch = strategy.place(BATCH)
    state, metrics = strategy.compile(step, state, batch, returns_state=True)(state, batch)
    for array in jax.tree.leaves((state, batch, metrics)):
        assert set(ids(array.sharding.device_set)) == where
    # One step of gradient descent from 0: the mean of 2 x y, times the rate.
    want = 0.1 * 2 * (X * X.sum(1, keepdims=True)).mean(0)
    assert_close(state.params["w"], want, 1e-5)


def test_auto_splits_over_the_devices_that_were_chosen():
    assert ids(Auto(devices=(6, 1)).among(None)) == [6, 1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "where"),
    [({"devices": ["cpu:1", "cpu:4"]}, {1, 4}), ({"devices": "cpu:3", "parallel": "single"}, {3})],
    ids=str,
)
def test_fit_evaluate_and_predict_compute_where_they_are_told(given, where):
    result = jt.fit(
        loss, {"w": jnp.zeros(4)}, (X, X.sum(1)), "sgd", lr=0.1, steps=2, quiet=True, **given
    )
    for array in jax.tree.leaves(result.state):
        assert set(ids(array.sharding.device_set)) == where
    # What is computed elsewhere would say so: arrays that lie on other devices are not taken.
    found = jt.evaluate(loss, result.params, (X, X.sum(1)), **given)
    apply = lambda params, batch: batch["x"] @ params["w"]
    guesses = jt.predict(apply, result.params, X, **given)
    assert found["loss"] == pytest.approx(float(((guesses - X.sum(1)) ** 2).mean()), rel=1e-5)


@pytest.mark.thorough
def test_a_cpu_is_cut_into_as_many_devices_as_the_last_index_needs():
    code = (
        "from jtrain.parallel import Single, Mirrored\n"
        "assert [d.id for d in Mirrored(devices=(0, 2)).build().mesh.devices] == [0, 2]\n"
        "import jax; print(jax.device_count())"
    )
    done = run_python("-c", code, env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"})
    assert done.stdout.split() == ["3"]


def chips(kind, count, cores=1):
    return [types.SimpleNamespace(device_kind=kind, core_on_chip=i % cores) for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "count", "cores", "teraflops"),
    [
        ("TPU v5 lite", 16, 1, 16 * 197),
        ("TPU7x", 8, 2, 4 * 2307),
        ("NVIDIA H100 80GB HBM3", 8, 1, 8 * 989),
    ],
)
def test_the_peak_of_all_devices(kind, count, cores, teraflops):
    assert peak_flops(chips(kind, count, cores)) == teraflops * 1e12


def test_a_processor_has_no_published_peak():
    assert peak_flops(chips("cpu", 8)) is None
    assert find_chip(chips("NVIDIA GeForce RTX 9999", 1)) is None
