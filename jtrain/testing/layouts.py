"""The default strategies of a check."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from jtrain.core.types import Dims
from jtrain.errors import ConfigError
from jtrain.parallel import FSDP, Axes, Mirrored, Parallel, Strategy

Layout: TypeAlias = Any  # a value of `jtrain.parallel`, or a strategy

# Axes that split the model; each needs a parameter with one of these dims.
MODEL_AXES = {
    "tensor": ("heads", "hidden", "vocab"),
    "expert": ("experts",),
    "stage": ("layers",),
    "context": ("heads",),
}


def list_layouts(rows: int, dims: Mapping[str, Dims], *, most: int = 8) -> dict[str, Parallel]:
    """Return strategy values of each kind that the rows divide into, on the available devices.

    Rows are split over 2, 4, ... devices; the largest number that divides them also gets every
    implementation, every level of `zero`, and each model axis with a matching dim in `dims`.
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
    named = {name for names in dims.values() for name in names if name}
    for axis, needed in MODEL_AXES.items():
        if named & set(needed):
            sizes: dict[str, Any] = {"data": n // 2, "fsdp": 1, axis: 2}
            found[f"{axis} 2, data {n // 2}"] = Axes(devices=n, min_size=0, **sizes)
    return found


def build_strategy(values: Layout) -> Strategy:
    """Build the strategy of these values; return a strategy unchanged.

    Raises:
        ConfigError: if the strategy needs more devices than are available; the message says how to
            simulate them.
    """
    if not hasattr(values, "build"):
        return values
    try:
        return values.build()
    except ConfigError as error:
        available = len(jax.devices())
        raise ConfigError(
            f"a check under {values} needs devices that are not available: {error} (a check "
            f"has {available}; `jtrain check CONFIG --devices 8` cuts the CPU into 8)"
        ) from error
