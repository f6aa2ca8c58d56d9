"""Meshes: sizes of the axes for the available devices."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AxisType, Mesh

from jtrain.errors import ConfigError
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

    Devices of one slice, then of one process, are neighbours, so that the last axes have the
    fastest links.
    """
    axes = [axis for axis in AXES if sizes.get(axis, 1) > 1] or [DATA]
    ordered = sorted(
        devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id)
    )
    shape = [sizes.get(axis, 1) for axis in axes]
    return Mesh(np.array(ordered).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))
