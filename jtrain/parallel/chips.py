"""Published figures of accelerators, by the names that JAX gives them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jtrain.parallel.devices import Device


class Chip(NamedTuple):
    """A kind of accelerator."""

    kind: str
    """The `device_kind` of its devices, or its beginning."""
    teraflops: float
    """Peak of a chip in products of bfloat16 (float16 on a T4 and V100), without sparsity."""
    gib: float = 0.0
    """Memory of a device for a program, as libtpu 0.0.51 gives it for one that is too large; 0:
    the device reports it."""


# Peaks of TPUs: https://docs.cloud.google.com/tpu/docs, the page of each (read in November 2026).
CHIPS: Mapping[str, Chip] = {
    "v2": Chip("TPU v2", 45, 7.48),
    "v3": Chip("TPU v3", 123, 15.48),
    "v4": Chip("TPU v4", 275, 15.25),
    "v5e": Chip("TPU v5 lite", 197, 15.75),
    "v5p": Chip("TPU v5", 459, 95.73),
    "v6e": Chip("TPU v6 lite", 918, 31.24),
    "tpu7x": Chip("TPU7x", 2307, 94.74),
}
"""TPUs, by the names in a topology such as `v5e:4x4`."""

# Of two kinds that fit, the first counts. Peaks: NVIDIA's data sheets, half of those with sparsity.
GPUS: tuple[Chip, ...] = (
    Chip("NVIDIA B200", 2250),
    Chip("NVIDIA GH200", 989),
    Chip("NVIDIA H200", 989),
    Chip("NVIDIA H100 PCIe", 756),
    Chip("NVIDIA H100 NVL", 835),
    Chip("NVIDIA H100", 989),
    Chip("NVIDIA A100", 312),
    Chip("NVIDIA L40S", 362),
    Chip("NVIDIA L40", 181),
    Chip("NVIDIA L4", 121),
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
    if chip is None:
        return None
    # A chip of v2, v3 and tpu7x is two devices; one of v4 and v5p is two only if asked for.
    per_chip = 1 + max(getattr(device, "core_on_chip", 0) or 0 for device in devices)
    return 1e12 * chip.teraflops * len(devices) / per_chip
