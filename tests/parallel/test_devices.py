"""Devices by number, by index and by name: the strategies that run on them, and what is refused."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from pydantic import ValidationError
from quick_study import write_study

import jtrain as jt
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError, UserError
from jtrain.parallel import FSDP, Auto, Axes, Mirrored, Single
from jtrain.parallel.device_names import parse_devices
from jtrain.parallel.devices import devices, one_device

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
        ((0, 2), [0, 2]),
        ((5,), [5]),
        ("cpu", range(8)),
        ("cpu:1", [1]),
        (("cpu:6", "cpu:3"), [6, 3]),
        ((7, "cpu:3"), [7, 3]),
        ("CPU:1", [1]),
        ("/cpu:1", [1]),
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
        ((), r"must name a device, found \[\]"),
        ((0, 0), r"must name each device once, found \[0,0\]"),
        ((1, "cpu:1"), "must name each device once"),
        ((0, -2), r"must name devices, and -2 is none, found \[0,-2\]"),
        ((0, True), "must name devices, and True is none"),
        ("cpu:", "must name devices, and 'cpu:' is none"),
        ("1", "must name devices, and '1' is none"),
        ("cpu:1:2", "must name devices, and 'cpu:1:2' is none"),
        (("cpu:0", "gpu:1"), r"must be devices of one platform, found \[cpu:0,gpu:1\]"),
        (("cpu", "cpu:1"), "must be a whole platform, or devices of it"),
        (1.5, "must say devices, found 1.5"),
        (True, "must say devices, found True"),
        ([[0, 2]], r"must name devices, and \[0, 2\] is none"),
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
        ("cpu:9", r"device_count=10"),
        ("gpu:1", r"gpu:1, and JAX reaches no gpu here: it has 8 x cpu \(cpu\)\. Take .*=cpu, or"),
        ("warp:1", r"JAX reaches no warp here"),
    ],
)
def test_devices_that_are_not_there_say_what_to_take(asked, said):
    with pytest.raises(ConfigError, match=said):
        devices(asked)


def test_a_platform_that_is_not_compiled_for_is_refused():
    with pytest.raises(ConfigError, match=r"the devices to compile for are tpu \(fake\)"):
        devices("gpu:1", fakes("tpu", processes=1, each=4))


def test_one_device_is_the_first_or_the_one_that_is_named():
    assert [one_device(asked).id for asked in (0, 1, (2,), "cpu:5", "cpu")] == [0, 0, 2, 5, 0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (2, r"=2 is a number of them\. .*index 2 write parallel.devices=\[2\]; .*kind=mirrored"),
        ((0, 2), r"kind=single takes one device, and parallel.devices=\[0,2\] names 2\."),
    ],
)
def test_several_devices_are_not_one(asked, said):
    with pytest.raises(ConfigError, match=said):
        Single(devices=asked).build()


@pytest.mark.parametrize(
    ("values", "where"),
    [
        (Single(devices="cpu:5"), {5}),
        (Mirrored(devices=(1, 4)), {1, 4}),
        (Mirrored(devices=(1, 4), zero=1), {1, 4}),
        (Mirrored(devices=(1, 4), impl="shard_map"), {1, 4}),
        (Mirrored(devices=(1, 4), impl="pmap"), {1, 4}),
        (FSDP(devices=("cpu:6", "cpu:3"), min_size=0), {3, 6}),
        (Axes(devices=(0, 2, 5, 7), data=2, min_size=0), {0, 2, 5, 7}),
    ],
    ids=["single", "mirrored", "zero 1", "shard_map", "pmap", "fsdp", "sharded"],
)
def test_every_strategy_takes_its_step_on_the_devices_that_were_chosen(values, where):
    strategy, optimizer = values.build(), optax.sgd(0.1)
    new = lambda: jt.new_state({"w": jnp.zeros(4)}, optimizer, jax.random.key(0))
    state = jax.jit(new, out_shardings=strategy.shardings(jax.eval_shape(new)))()
    step = jt.make_step(loss, optimizer, psum=strategy.psum)
    batch = strategy.place(BATCH)
    state, metrics = strategy.compile(step, state, batch, keeps=True)(state, batch)
    for array in jax.tree.leaves((state, batch, metrics)):
        assert set(ids(array.sharding.device_set)) == where
    # One step of gradient descent from 0: the mean of 2 x y, times the rate.
    want = 0.1 * 2 * (X * X.sum(1, keepdims=True)).mean(0)
    assert_close(state.params["w"], want, 1e-5)


def test_auto_splits_over_the_devices_that_were_chosen():
    assert ids(Auto(devices=(6, 1)).among(None)) == [6, 1]


@pytest.mark.parametrize(
    ("kind", "typed", "values"),
    [
        ("mirrored", "[0, 2]", (0, 2)),
        ("fsdp", "[cpu:0, cpu:2]", ("cpu:0", "cpu:2")),
        ("single", "cpu:1", "cpu:1"),
        ("auto", "cpu", "cpu"),
        ("sharded", "4", 4),
    ],
)
def test_a_config_names_devices(kind, typed, values, pytestconfig):
    path = pytestconfig.rootpath / "configs/mnist1d_logistic.yaml"
    words = [f"parallel.kind={kind}", f"parallel.devices={typed}"]
    assert resolve(path, words).config.parallel.devices == values


def test_a_config_that_names_none_says_so_with_its_line(pytestconfig):
    path = pytestconfig.rootpath / "configs/mnist1d_logistic.yaml"
    said = (
        r"^command line: parallel.devices=\[0, 0\]: must name each device once, found \[0,0\]\. W"
    )
    with pytest.raises(UserError, match=said):
        resolve(path, ["parallel.devices=[0, 0]"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"devices": ["cpu:1", "cpu:4"]}, {1, 4}),
        ({"devices": "cpu:3", "parallel": "single"}, {3}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"devices": [2]}, {2}),
                ({"devices": jax.devices()[5:7], "parallel": FSDP(min_size=0)}, {5, 6}),
                ({"devices": jax.devices()[7], "parallel": "single"}, {7}),
                ({"parallel": Single(devices=[6])}, {6}),
            )
        ),
    ],
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


def test_fit_refuses_what_is_no_device():
    call = lambda **given: jt.fit(
        loss, {"w": jnp.zeros(4)}, (X, X.sum(1)), "sgd", lr=0.1, steps=2, quiet=True, **given
    )
    with pytest.raises(
        ConfigError, match=r"devices=1\.5: must say devices, found 1\.5\. Write how"
    ):
        call(devices=1.5)
    with pytest.raises(ConfigError, match=r"parallel.devices=gpu:1, and JAX reaches no gpu here"):
        call(devices="gpu:1")


@pytest.mark.thorough
def test_a_cpu_is_cut_into_as_many_devices_as_the_last_index_needs():
    code = (
        "from jtrain.parallel import Single, Mirrored\n"
        "assert [d.id for d in Mirrored(devices=(0, 2)).build().mesh.devices] == [0, 2]\n"
        "import jax; print(jax.device_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["3"]


def test_a_run_splits_the_cpu_of_a_process_that_has_started_no_device(tmp_path):
    path = write_study(tmp_path)
    settings = ("steps=1", "batch=4", "evaluate.every=0", "parallel.devices=2")
    code = (
        "import jax, jtrain.cli; code = jtrain.cli.main(['run', *__import__('sys').argv[1:]])\n"
        "assert code == 0; print(jax.device_count())"
    )
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), "parallel.kind=mirrored", *settings],
        env=env | {"JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "2"
