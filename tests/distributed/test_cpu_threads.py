"""Threads for the collectives of several CPU devices."""

import os

import pytest

from chaos.threads import SPLITS, Split, run_split
from jtrain.distributed import cpu_threads
from jtrain.distributed.cpu_threads import POOL, describe_small_pool, size_thread_pool


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
        ({}, 0, None),
        ({}, 1, None),
        ({}, 4, "32"),
        ({}, 16, "64"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, 0, "32"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=64 --xla_a=1"}, 0, "256"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=eight"}, 0, None),
        ({POOL: "3"}, 4, "3"),
    ],
)
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "split", [Split("fsdp", 4, 2, 8, 1), Split("fsdp", 8, 2, 16, 0), Split("tensor", 8, 2, 8, 1)]
)
def test_collectives_on_few_cores_do_not_deadlock(split, tmp_path):
    assert split in SPLITS
    code, last = run_split(split, tmp_path)
    assert code == 0, last
