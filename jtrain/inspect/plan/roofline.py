"""Roofline estimate of a step: its time at the published speeds of the chips."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.inspect.plan.collectives import Collective
from jtrain.inspect.plan.compile import plan_cache
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.schedule import Simulation, Speeds, Timeline
from jtrain.io.regular_files import atomic_write
from jtrain.parallel.chips import Chip, devices_per_chip, find_chip

HOST = {"tpu": 16e9, "gpu": 55e9}
"""Bytes a second between a chip and its host; no published figure: PCIe of 16 lanes."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimate of a step: no measurement, and faster than a real one."""

    timeline: Timeline
    """The simulated schedule on each device."""
    peak: float
    """Operations a second of a device."""
    chip: str
    """The figures that the estimate uses."""
    source: str
    """The page that they are from."""

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.timeline.total

    @property
    def bound(self) -> str:
        """The largest part: compute, memory or interconnect."""
        line = self.timeline
        parts = {"compute": line.compute, "memory": line.memory, "interconnect": line.links}
        return max(parts, key=lambda name: parts[name])

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in seconds."""
        names = ("compute", "memory", "links", "exposed", "flops")
        return {
            "seconds": self.seconds,
            **{name: getattr(self.timeline, name) for name in names},
            **{name: getattr(self, name) for name in ("peak", "chip", "source", "bound")},
        }


def estimate_step(
    program: HloProgram, axes: Mapping[str, int], devices: Sequence[Any]
) -> Estimate | None:
    """Return the estimate of a compiled step; None for chips with figures that are not known.

    Args:
        axes: the mesh, whose axes multiply to the number of devices.
        devices: of the mesh, in its order.
    """
    chip = find_chip(devices)
    if devices[0].platform == "cpu":
        speeds, figures = cpu_speeds(len(devices)), "speeds measured on this machine"
        source = ""
    elif chip is None or not _is_known(chip, devices):
        return None
    else:
        speeds = chip_speeds(chip, axes, devices)
        figures, source = describe_chip(chip), chip.source
    return Estimate(Simulation(program, axes, speeds).run(), speeds.flops, figures, source)


def chip_speeds(chip: Chip, axes: Mapping[str, int], devices: Sequence[Any]) -> Speeds:
    """Return the speeds of one of these devices, by the figures of its chip."""
    per_chip = devices_per_chip(devices)
    mesh = np.asarray(devices, dtype=object).reshape(tuple(axes.values()))

    def link(collective: Collective) -> float:
        group = _group(mesh, tuple(axes), collective.axes)
        inside = sum(_domain(device) == _domain(group[0]) for device in group)
        coords = [
            getattr(device, "coords", ())
            for device in group
            if _domain(device) == _domain(group[0])
        ]
        spanned = sum(len(set(values)) > 1 for values in zip(*coords, strict=True))
        used = 1 if collective.kind == "collective-permute" else min(chip.links, 2 * spanned or 1)
        within = 1e9 * chip.link * used / per_chip
        if inside == len(group):
            return within
        # All devices of a slice or machine send over their networks at once.
        outside = 1e9 * chip.network * inside / per_chip
        return outside if inside == 1 else min(within, outside)

    return Speeds(
        flops=1e12 * chip.teraflops / per_chip,
        memory=1e9 * chip.memory / per_chip,
        host=HOST[devices[0].platform] / per_chip,
        link=link,
        fp8=1e12 * chip.fp8 / per_chip,
    )


def _is_known(chip: Chip, devices: Sequence[Any]) -> bool:
    """Return whether all figures that an estimate needs are published."""
    apart = len({_domain(device) for device in devices}) > 1
    return bool(chip.memory and (chip.network or not apart))


def describe_chip(chip: Chip) -> str:
    """Return the figures of a chip in words."""
    fp8 = f" and {chip.fp8:g} in fp8" if chip.fp8 else ""
    words = [f"{chip.teraflops:g} TFLOP/s in bfloat16{fp8}", f"memory {chip.memory:g} GB/s"]
    if chip.links == 1:
        words.append(f"NVLink {chip.link:g} GB/s each way")
    elif chip.links:
        words.append(f"{chip.links} links of {chip.link:g} GB/s each way")
    if chip.network:
        words.append(f"network {chip.network:g} GB/s")
    return f"{chip.kind}: {', '.join(words)}"


def _group(mesh: np.ndarray, names: Sequence[str], axes: Sequence[str]) -> list[Any]:
    """Return the devices of the first group along some axes of a mesh."""
    index = tuple(slice(None) if name in axes else 0 for name in names)
    return list(np.ravel(mesh[index])) if axes else list(np.ravel(mesh))


def _domain(device: Any) -> Any:
    """Return what devices with fast links between them share: a slice of a TPU, or a machine."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", 0) or 0
    return device.process_index


def cpu_speeds(devices: int) -> Speeds:
    """Return the speeds of a virtual device: a share of the machine's.

    They are in the cache of plans, so that two estimates differ by their programs alone.
    """
    file = plan_cache() / "cpu_speeds.json"
    flops, memory = _read(file) or _measure(file)
    share = memory / devices
    return Speeds(flops / devices, share, share, lambda _: share / 2)


def _measure(file: Path) -> tuple[float, float]:
    """Measure operations and bytes a second, and write them."""
    size = 1024
    x, large = jnp.ones((size, size), jnp.float32), jnp.ones(2**22, jnp.float32)
    product, total = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    flops = 2.0 * size**3 / _fastest(lambda: product(x))
    memory = 2.0 * large.nbytes / _fastest(lambda: total(large))
    with contextlib.suppress(OSError):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        atomic_write(file, json.dumps({"flops": flops, "memory": memory}).encode())
    return flops, memory


def _read(file: Path) -> tuple[float, float] | None:
    try:
        found = json.loads(file.read_text())
        return float(found["flops"]), float(found["memory"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _fastest(run: Callable[[], Any], seconds: float = 0.3) -> float:
    """Return the shortest time of a call, repeated for some seconds."""
    jax.block_until_ready(run())
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best
