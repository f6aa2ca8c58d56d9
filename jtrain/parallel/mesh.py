"""Axes and their sizes for the devices at hand, and the mesh of them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AxisType, Mesh

from jtrain.errors import ConfigError
from jtrain.parallel.devices import DATA, Device
from jtrain.parallel.rules import AXES

ANY_NUMBER = "parallel.kind=fsdp parallel.devices=0"  # a layout that fits whatever is there


def fill_sizes(asked: Mapping[str, int], devices: int) -> dict[str, int]:
    """The sizes of all axes, one that is 0 being what the others leave of the devices.

    Raises:
        ConfigError: if they do not multiply to the number of devices, with the nearest that do.
    """
    open_axes = [axis for axis in AXES if asked.get(axis, 1) == 0]
    sizes = {axis: asked.get(axis, 1) for axis in AXES}
    if len(open_axes) > 1:
        raise ConfigError(
            f"parallel.{open_axes[0]}=0 and parallel.{open_axes[1]}=0: only one axis can be what "
            f"the others leave. Give all but one a size."
        )
    given = math.prod(size for size in sizes.values() if size)
    if open_axes and devices % given == 0:
        return {**sizes, open_axes[0]: devices // given}
    if not open_axes and given == devices:
        return sizes
    said = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "no axis"
    fewer = f"; or parallel.devices={given} of them" if given < devices else ""
    raise ConfigError(
        f"parallel: {said} = {given} parts, and there {'is' if devices == 1 else 'are'} {devices} "
        f"device{'s' * (devices > 1)}. Nearest: {_nearest(sizes, devices)}{fewer}."
    )


def _nearest(sizes: Mapping[str, int], devices: int) -> str:
    """The one axis whose change mends it, changed the least, as it is typed; or another layout."""
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
    """The mesh of the axes that are larger than 1, `data` if none is.

    Devices of one slice, then of one process, stay together, so that the last axes have the fastest
    links.
    """
    axes = [axis for axis in AXES if sizes.get(axis, 1) > 1] or [DATA]
    there = sorted(
        devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id)
    )
    shape = [sizes.get(axis, 1) for axis in axes]
    return Mesh(np.array(there).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))
