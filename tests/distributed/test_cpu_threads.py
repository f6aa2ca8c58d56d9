"""Threads for the collectives of several CPU devices, and the end of devices that deadlock."""

import itertools
import os
import threading

import pytest

from chaos.threads import SPLITS, Split, run_split
from jtrain.distributed import cpu_threads
from jtrain.distributed.cpu_threads import POOL, describe_small_pool, size_thread_pool
from jtrain.distributed.watchdog import DeadlockWatch
from jtrain.errors import FAULT


@pytest.fixture
def before_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return to the moment before JAX starts its devices, on two cores."""
    monkeypatch.setattr(cpu_threads, "has_devices", lambda: False)
    monkeypatch.setattr(cpu_threads, "_given", [])
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", POOL):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "devices", "expected"),
    [
        ({}, 0, None), ({}, 1, None), ({}, 4, "32"), ({}, 16, "64"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, 0, "32"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=64 --xla_a=1"}, 0, "256"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=eight"}, 0, None),
        ({POOL: "3"}, 4, "3"),
    ],
)  # fmt: skip
def test_pool_has_threads_for_the_devices(before_devices, monkeypatch, environ, devices, expected):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    size_thread_pool(devices)
    assert os.environ.get(POOL) == expected
    small = describe_small_pool(devices)
    assert bool(small) == (expected == "3")
    assert not small or f"{POOL}=32" in small[0]
    cpu_threads.release_pool_variable()
    assert os.environ.get(POOL) == environ.get(POOL)  # nothing is left to a child process
    assert describe_small_pool(devices) == small


def test_pool_of_devices_that_run_is_not_changed(before_devices, monkeypatch):
    monkeypatch.setattr(cpu_threads, "has_devices", lambda: True)
    size_thread_pool(8)
    assert POOL not in os.environ
    assert f"{POOL}=32" in describe_small_pool(8)[0]


def test_deadlocked_devices_end_the_process_with_a_sentence(capfd):
    codes, ended = [], threading.Event()
    leave = lambda code: (codes.append(code), ended.set())
    clock = {"patience": 3, "tick": 0.001, "clock": lambda: 1.0}
    watch = DeadlockWatch("Set NPROC=32.", waits=lambda: True, leave=leave, **clock)
    with watch:
        assert ended.wait(300)
    assert codes == [FAULT]
    assert "Set NPROC=32." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "waits"),
    [
        (itertools.count(0, 1.0), lambda: True),  # it computes
        (itertools.repeat(1.0), lambda: False),  # it waits for data, or for a person
        ((n // 3 for n in itertools.count()), lambda: True),  # it computes now and then
    ],
)
def test_what_is_no_deadlock_ends_nothing(seconds, waits):
    codes, enough, calls = [], threading.Event(), itertools.count()

    def clock() -> float:
        if next(calls) > 20:
            enough.set()
        return next(seconds)

    watch = DeadlockWatch("", patience=3, tick=0.001, clock=clock, waits=waits, leave=codes.append)
    with watch:
        assert enough.wait(300)
    assert codes == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "split", [Split("fsdp", 4, 2, 8, 1), Split("fsdp", 8, 2, 16, 0), Split("tensor", 8, 2, 8, 1)]
)
def test_collectives_on_few_cores_do_not_deadlock(split, tmp_path):
    assert split in SPLITS
    code, last = run_split(split, tmp_path)
    assert code == 0, last
