"""Meshes: sizes of the axes for the available devices."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jtrain.errors import ConfigError
from jtrain.parallel.chips import find_chip
from jtrain.parallel.devices import DATA, Device
from jtrain.parallel.rules import AXES

ANY_NUMBER = "parallel.kind=fsdp parallel.devices=0"  # a layout for any number of devices


def fill_sizes(asked: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return the sizes of all axes; one axis of size 0 takes the remaining devices.

    Raises:
        ConfigError: with the nearest sizes, if their product is not the number of devices.
    """
    open_axes = [axis for axis in AXES if asked.get(axis, 1) == 0]
    sizes = {axis: asked.get(axis, 1) for axis in AXES}
    if len(open_axes) > 1:
        raise ConfigError(
            f"parallel.{open_axes[0]}=0 and parallel.{open_axes[1]}=0: only one axis can take "
            f"the remaining devices. Give all but one a size."
        )
    given = math.prod(size for size in sizes.values() if size)
    if open_axes and devices % given == 0:
        return {**sizes, open_axes[0]: devices // given}
    if not open_axes and given == devices:
        return sizes
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "no axis"
    fewer = f"; or parallel.devices={given} of them" if given < devices else ""
    raise ConfigError(
        f"parallel: {layout} = {given} shards, and there {'is' if devices == 1 else 'are'} "
        f"{devices} device{'s' * (devices > 1)}. Nearest: {_nearest(sizes, devices)}{fewer}."
    )


def _nearest(sizes: Mapping[str, int], devices: int) -> str:
    """Return the smallest change of one axis that fits, as it is typed; or another layout."""
    found = []
    for axis in AXES:
        others = math.prod(size for a, size in sizes.items() if size and a != axis)
        if devices % others == 0:
            found.append(
                (abs(devices // others - sizes[axis]), sizes[axis] == 1, axis, devices // others)
            )
    if not found:
        return ANY_NUMBER
    _, _, axis, size = min(found)
    return f"parallel.{axis}={size}"


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Device]) -> Mesh:
    """Return the mesh of the axes that are larger than 1; of `data` if none is.

    The last axes have the fastest links: see `order_devices`.
    """
    axes = [axis for axis in AXES if sizes.get(axis, 1) > 1] or [DATA]
    ordered = order_devices([sizes.get(axis, 1) for axis in axes], devices)
    return Mesh(ordered, axes, axis_types=(AxisType.Auto,) * len(axes))


def order_devices(shape: Sequence[int], devices: Sequence[Device]) -> np.ndarray:
    """Return the devices as an array of this shape, in which the last axes have the fastest links.

    CPUs and GPUs are in the order of their hosts. On TPUs JAX's order along the torus is compared
    with that of the hosts, axis by axis from the last: an axis whose devices form the shorter ring
    decides, so an axis of 4 lies in the 2x2 chips of a host and not in a line. An axis over the
    whole slice is as long in both orders, and runs along the torus: the compiler has gathers for
    it, and gathers an axis in the order of hosts by reducing zeros.
    """
    hosts, torus = host_order(devices).reshape(shape), _torus_order(shape, devices)
    if torus is None:
        return hosts
    return torus if len(shape) == 1 else min(torus, hosts, key=ring_hops)


def count_slices(devices: Sequence[Device]) -> int:
    """Return the number of TPU slices that have as many of the devices each; else 1."""
    sizes = Counter(map(_slice, devices))
    alike = devices[0].platform == "tpu" and len(set(sizes.values())) == 1
    return len(sizes) if alike else 1


def host_order(devices: Sequence[Device]) -> np.ndarray:
    """Return the devices by slice, process and number."""
    key = lambda device: (_slice(device), device.process_index, device.id)
    return np.array(sorted(devices, key=key))


def ring_hops(ordered: np.ndarray) -> list[int]:
    """Return the links that a ring through the devices of each axis passes, last axis first.

    Devices of different slices are not counted, and the ring goes to the nearest device each time.
    """
    chip, slices = find_chip(ordered.flat[:1].tolist()), {}
    for device in ordered.flat:
        slices.setdefault(_slice(device), []).append(device.coords)
    sizes = np.ptp(next(iter(slices.values())), axis=0) + 1
    wrap = chip is not None and chip.has_wrap([size for size in sizes if size > 1])
    hops = []
    for axis in reversed(range(ordered.ndim)):
        line = ordered[tuple(slice(None) if a == axis else 0 for a in range(ordered.ndim))]
        places = sorted(tuple(d.coords) for d in line if _slice(d) == _slice(line[0]))
        hops.append(_ring(np.array(places), sizes if wrap else sizes * 2))
    return hops


def _ring(places: np.ndarray, sizes: np.ndarray) -> int:
    """Return the hops of a ring through places of a torus of these sizes."""
    first, left, hops = places[0], places[1:], 0
    at = first
    while len(left):
        apart = np.abs(left - at)
        apart = np.minimum(apart, sizes - apart).sum(1)
        nearest = int(apart.argmin())
        hops, at = hops + int(apart[nearest]), left[nearest]
        left = np.delete(left, nearest, 0)
    back = np.abs(first - at)
    return hops + int(np.minimum(back, sizes - back).sum())


def _torus_order(shape: Sequence[int], devices: Sequence[Device]) -> np.ndarray | None:
    """Return JAX's order along the torus of each slice; None for devices that are on none."""
    if devices[0].platform != "tpu" or any(not hasattr(d, "coords") for d in devices):
        return None
    devices, count = host_order(devices).tolist(), len({_slice(device) for device in devices})
    over = []  # sizes over the slices: the first axes
    for size in shape:
        over.append(math.gcd(size, count // math.prod(over)))
    within = [size // slices for size, slices in zip(shape, over, strict=True)]
    try:
        if count == 1:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return mesh_utils.create_hybrid_device_mesh(
            within, over, devices, allow_split_physical_axes=True
        )
    # A part of a slice has holes, and two devices of a chip have one place on the torus.
    except (ValueError, AssertionError, NotImplementedError, IndexError):
        return None


def _slice(device: Device) -> int:
    return getattr(device, "slice_index", 0) or 0
