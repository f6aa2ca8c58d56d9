"""Speeds of links by the published figures, on meshes of absent devices."""

from types import SimpleNamespace

import pytest

from jtrain.inspect.plan.overlap import PlacedCollective
from jtrain.inspect.plan.roofline import Estimate, chip_speeds, describe_chip
from jtrain.parallel.chips import CHIPS, GPUS

H100 = next(chip for chip in GPUS if chip.kind == "NVIDIA H100")


def tpu(rows: int, columns: int, slices: int = 1, core: int = 0) -> list:
    make = lambda s, x, y: SimpleNamespace(
        platform="tpu", slice_index=s, coords=[x, y, 0], core_on_chip=core, process_index=0
    )
    return [make(s, x, y) for s in range(slices) for x in range(rows) for y in range(columns)]


def gpus(machines: int, each: int) -> list:
    return [
        SimpleNamespace(platform="gpu", process_index=m, device_kind="NVIDIA H100 80GB HBM3")
        for m in range(machines)
        for _ in range(each)
    ]


def collective(kind: str, *axes: str) -> PlacedCollective:
    return PlacedCollective("", kind, axes, 1, "")


@pytest.mark.parametrize(
    ("mesh", "devices", "kind", "axes", "gigabytes"),
    [
        ({"fsdp": 16}, tpu(4, 4), "all-gather", ("fsdp",), 200),  # four links of 50
        ({"fsdp": 4, "tensor": 4}, tpu(4, 4), "all-gather", ("tensor",), 100),  # of a row
        ({"fsdp": 16}, tpu(4, 4), "collective-permute", ("fsdp",), 50),  # to a neighbour
        ({"slice": 2, "fsdp": 16}, tpu(4, 4, 2), "all-reduce", ("slice",), 3.1),
        ({"slice": 2, "fsdp": 16}, tpu(4, 4, 2), "all-reduce", ("slice", "fsdp"), 49.6),
        ({"fsdp": 16}, tpu(4, 4, core=1), "all-gather", ("fsdp",), 100),  # half a chip each
    ],
)
def test_a_collective_of_a_slice_uses_the_links_of_its_axes(mesh, devices, kind, axes, gigabytes):
    speeds = chip_speeds(CHIPS["v5e"], mesh, devices)
    assert speeds.link(collective(kind, *axes)) == pytest.approx(1e9 * gigabytes)


@pytest.mark.parametrize(
    ("mesh", "machines", "axes", "gigabytes"),
    [
        ({"fsdp": 8}, 1, ("fsdp",), 450),
        ({"fsdp": 16}, 2, ("fsdp",), 400),  # eight adapters of 50 a machine
        ({"data": 2, "fsdp": 8}, 2, ("data",), 50),
        ({"data": 2, "fsdp": 8}, 2, ("fsdp",), 450),
    ],
)
def test_a_collective_of_machines_uses_their_networks(mesh, machines, axes, gigabytes):
    speeds = chip_speeds(H100, mesh, gpus(machines, 8))
    assert speeds.link(collective("all-gather", *axes)) == pytest.approx(1e9 * gigabytes)


def test_mfu_counts_the_models_flops_against_the_peak():
    one = dict.fromkeys(("compute", "memory", "links", "exposed", "flops"), 0.0)
    found = Estimate(seconds=2.0, peak=100.0, chip="", source="", **one)
    assert found.mfu(800.0, devices=8) == 0.5


def test_chips_in_a_topology_have_published_figures():
    named = [*CHIPS.values(), *(chip for chip in GPUS if chip.memory)]
    for chip in named:
        assert chip.memory > 0 < chip.link
        assert chip.source.startswith("https://")
        assert f"{chip.teraflops:g} TFLOP/s" in describe_chip(chip)
