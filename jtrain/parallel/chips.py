"""Published figures of accelerators, by the names that JAX gives them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jtrain.parallel.devices import Device


class Chip(NamedTuple):
    """A kind of accelerator, with the figures that its vendor publishes."""

    kind: str
    """The `device_kind` of its devices, or its beginning."""
    teraflops: float
    """Peak of a chip in products of bfloat16 (float16 on a T4 and V100), without sparsity."""
    gib: float = 0.0
    """Memory of a device for a program, as libtpu 0.0.51 gives it for one that is too large; 0:
    the device reports it."""
    memory: float = 0.0
    """GB a second between a chip and its memory; 0: not known here."""
    link: float = 0.0
    """GB a second that a chip sends over one of its links to other chips; 0: not known here."""
    links: int = 0
    """Links of a chip: two for each direction of a torus; 1 stands for a switch."""
    network: float = 0.0
    """GB a second that a chip sends to another slice or machine; 0: not known here."""
    source: str = ""
    """Page that the figures are from."""
    fp8: float = 0.0
    """Peak of a chip in products of fp8, without sparsity; 0: it has none."""
    ring: int = 0
    """A slice whose sizes are all multiples of this number has links that close each of its rows
    into a ring; 0: no slice has."""

    def has_wrap(self, sizes: Sequence[int]) -> bool:
        """Return whether a slice of these sizes is a torus, not a grid."""
        return self.ring > 0 and all(size % self.ring == 0 for size in sizes)


_TPU = "https://docs.cloud.google.com/tpu/docs"

# TPUs: the page of each, read in November 2026. A link is the published bandwidth between chips,
# one way, divided by the links; the network is the published figure of a pod divided by its chips.
# Links of v2 and v3: Norrie et al. 2021, "The Design Process for Google's Training Chips".
# Rings: "All 4x4x4 and larger slices (one cube) have full 3D torus connectivity. Slices smaller
# than a full cube [...] don't have wrap-around links" (v5p; v4 and tpu7x have the same cubes), and
# the whole pod of 16x16 of v5e and v6e, whose smaller slices are grids.
CHIPS: Mapping[str, Chip] = {
    "v2": Chip("TPU v2", 45, 7.48, 700, 62, 4, 0, f"{_TPU}/v2"),
    "v3": Chip("TPU v3", 123, 15.48, 900, 82, 4, 0, f"{_TPU}/v3"),
    "v4": Chip("TPU v4", 275, 30.75, 1200, 50, 6, 0, f"{_TPU}/v4", ring=4),
    "v5e": Chip("TPU v5 lite", 197, 15.75, 819, 50, 4, 3.1, f"{_TPU}/v5e", ring=16),
    "v5p": Chip("TPU v5", 459, 95.73, 2765, 100, 6, 6.25, f"{_TPU}/v5p", ring=4),
    "v6e": Chip("TPU v6 lite", 918, 31.24, 1638, 100, 4, 12.5, f"{_TPU}/v6e", ring=16),
    "tpu7x": Chip("TPU7x", 2307, 94.74, 7380, 100, 6, 12.5, f"{_TPU}/tpu7x", 4614, 4),
}
"""TPUs, by the names in a topology such as `v5e:4x4`."""

_NVIDIA = "https://www.nvidia.com/en-us/data-center"

# Of two kinds that fit, the first counts. Peaks: NVIDIA's data sheets, half of those with sparsity.
# Links: half of the published NVLink bandwidth, which counts both directions. Networks: one adapter
# for each GPU of a DGX, of 400 Gb/s (A100: 200).
GPUS: tuple[Chip, ...] = (
    Chip("NVIDIA B200", 2250, 0, 7700, 900, 1, 50, f"{_NVIDIA}/dgx-b200", 4500),
    Chip("NVIDIA GH200", 989, fp8=1979),
    Chip("NVIDIA H200", 989, 0, 4800, 450, 1, 50, f"{_NVIDIA}/h200", 1979),
    Chip("NVIDIA H100 PCIe", 756, fp8=1513),
    Chip("NVIDIA H100 NVL", 835, fp8=1671),
    Chip("NVIDIA H100", 989, 0, 3350, 450, 1, 50, f"{_NVIDIA}/h100", 1979),
    Chip("NVIDIA A100", 312, 0, 2039, 300, 1, 25, f"{_NVIDIA}/a100"),
    Chip("NVIDIA L40S", 362, fp8=733),
    Chip("NVIDIA L40", 181, fp8=362),
    Chip("NVIDIA L4", 121, fp8=242),
    Chip("Tesla V100", 125),
    Chip("Tesla T4", 65),
)


def find_chip(devices: Sequence[Device]) -> Chip | None:
    """Return the chip that the devices are of; None if its figures are not known here."""
    kind = devices[0].device_kind
    exact = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    return exact or next((chip for chip in GPUS if kind.startswith(chip.kind)), None)


def peak_flops(devices: Sequence[Device]) -> float | None:
    """Return the peak FLOP a second of all devices together, in bfloat16; None if not known."""
    chip = find_chip(devices)
    return chip and 1e12 * chip.teraflops * len(devices) / devices_per_chip(devices)


def devices_per_chip(devices: Sequence[Device]) -> int:
    """Return how many devices a chip is: two of v2, v3 and tpu7x; of v4 and v5p if asked for."""
    return 1 + max(getattr(device, "core_on_chip", 0) or 0 for device in devices)
