"""The strategies that a check goes through."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from jtrain.core.types import Dims
from jtrain.errors import ConfigError
from jtrain.parallel import FSDP, Axes, Mirrored, Parallel, Strategy

Layout: TypeAlias = Any  # values of `jtrain.parallel`, or the strategy itself

# The axes that split more than rows, by a name of a dim that they need one of.
ALONG = {
    "tensor": ("heads", "hidden", "vocab"),
    "expert": ("experts",),
    "stage": ("layers",),
    "context": ("heads",),
}


def fitting(rows: int, dims: Mapping[str, Dims], *, most: int = 8) -> dict[str, Parallel]:
    """Values of each kind of strategy that these rows divide into, over the devices at hand.

    Rows over 2, 4, ... devices and, on as many as they fit, every implementation and every level of
    `zero`; of the axes that split a model those of which `dims` names a dim.
    """
    counts = [n for n in (2, 4, 8) if n <= min(most, len(jax.devices())) and rows % n == 0]
    if not counts:
        return {}
    n = counts[-1]
    found: dict[str, Parallel] = {f"mirrored on {k}": Mirrored(devices=k) for k in counts}
    found |= {
        f"shard_map on {n}": Mirrored(devices=n, impl="shard_map"),
        f"pmap on {n}": Mirrored(devices=n, impl="pmap"),
        f"zero 1 on {n}": Mirrored(devices=n, zero=1),
        f"zero 2 on {n}": Mirrored(devices=n, zero=2),
        f"fsdp on {n} (zero 3)": FSDP(devices=n, min_size=0),
    }
    named = {name for of in dims.values() for name in of if name}
    for axis, needed in ALONG.items():
        if named & set(needed):
            sizes: dict[str, Any] = {"data": n // 2, "fsdp": 1, axis: 2}
            found[f"{axis} 2, data {n // 2}"] = Axes(devices=n, min_size=0, **sizes)
    return found


def built(values: Layout) -> Strategy:
    """The strategy of these values; itself if it is one.

    Raises:
        ConfigError: if it needs more devices than there are, with how to have them.
    """
    if not hasattr(values, "build"):
        return values
    try:
        return values.build()
    except ConfigError as error:
        there = len(jax.devices())
        raise ConfigError(
            f"a check under {values} needs devices that are not here: {error} (a check "
            f"has {there}; `jtrain check CONFIG --devices 8` cuts the CPU into 8)"
        ) from error
