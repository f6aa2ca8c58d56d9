"""The default strategies of a check."""

from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

import jax

from jtrain import parallel
from jtrain.core.types import Dims
from jtrain.errors import ConfigError

Layout: TypeAlias = Any  # a value of `jtrain.parallel.Layout`, or a strategy


def list_layouts(
    rows: int, dims: Mapping[str, Dims], *, most: int = 8
) -> dict[str, parallel.Layout]:
    """Return layouts of each kind that the rows divide into, on the available devices.

    Rows are split over 2, 4, ... devices. Each config of `jtrain.parallel.Layout` names its own
    (`list_variants`); `dims` decides which axes can split the model.
    """
    counts = [n for n in (2, 4, 8) if n <= min(most, len(jax.devices())) and rows % n == 0]
    if not counts:
        return {}
    named = {name for names in dims.values() for name in names if name}
    kinds = get_args(parallel.Layout)
    return {
        name: layout for kind in kinds for name, layout in kind.list_variants(counts, named).items()
    }


def build_strategy(values: Layout) -> parallel.Strategy:
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
