"""Peaks are those of the devices that JAX names, by chip or by half a chip."""

import types

import pytest

from jtrain.parallel.chips import find_chip, peak_flops


def devices(kind, count, cores=1):
    return [types.SimpleNamespace(device_kind=kind, core_on_chip=i % cores) for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "count", "cores", "teraflops"),
    [
        ("TPU v5 lite", 16, 1, 16 * 197),
        ("TPU v5", 8, 1, 8 * 459),
        ("TPU7x", 8, 2, 4 * 2307),
        ("TPU v4", 4, 1, 4 * 275),
        ("TPU v4", 8, 2, 4 * 275),
        ("NVIDIA H100 80GB HBM3", 8, 1, 8 * 989),
        ("NVIDIA H100 PCIe", 1, 1, 756),
        ("NVIDIA A100-SXM4-40GB", 2, 1, 2 * 312),
        ("NVIDIA L40S", 1, 1, 362),
        ("NVIDIA L4", 1, 1, 121),
    ],
)
def test_the_peak_of_all_devices(kind, count, cores, teraflops):
    assert peak_flops(devices(kind, count, cores)) == teraflops * 1e12


def test_a_processor_has_no_published_peak():
    assert peak_flops(devices("cpu", 8)) is None
    assert find_chip(devices("NVIDIA GeForce RTX 9999", 1)) is None
