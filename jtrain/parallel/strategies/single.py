"""A single device."""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Lowered

from jtrain.config.configclass import configclass
from jtrain.core.types import Batch, Dims
from jtrain.errors import ShardingError
from jtrain.parallel.devices import Device, Devices, one_device, split_cpu
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.strategies.strategy import (
    BaseParallelConfig,
    PlacedBatchCache,
    Strategy,
    plain,
    same_for_all,
)

_TYPES = {np.dtype(name) for name in ("bool", "uint8", "int8", "int32", "uint32", "float32")}


class OneDevice(Strategy):
    """The strategy of a single device."""

    def __init__(self, device: Device):
        self._device, self._platform = SingleDeviceSharding(device), device.platform
        self.mesh = make_mesh({}, [device])

    @property
    def shares(self) -> int:
        """One: the device has all rows."""
        return 1

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """Place every leaf on the device."""
        del dims
        return same_for_all(tree, self._device)

    def place(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """Place a batch on the device."""
        del stacked
        return self._put(batch)

    def place_for_call(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """Place on a CPU the read-only arrays alone, which are the same in every batch."""
        del stacked
        if self._platform != "cpu":
            return self._put(batch)
        host = {name: x for name, x in batch.items() if _is_for_call(x)}
        return {**self._put({name: x for name, x in batch.items() if name not in host}), **host}

    @functools.cached_property
    def _put(self) -> PlacedBatchCache:
        return PlacedBatchCache(
            jax.jit(lambda tree: tree, in_shardings=self._device, out_shardings=self._device)
        )

    def lower(
        self,
        fn: Callable,
        state: Any,
        batch: Any,
        /,
        *,
        stacked: bool = False,
        returns_state: bool = False,
    ) -> Lowered:
        """Lower `fn` by `jax.jit`."""
        del stacked
        jitted = jax.jit(
            fn,
            in_shardings=self._device,
            out_shardings=self._device,
            donate_argnums=0 if returns_state else (),
        )
        return jitted.lower(*plain(state, batch))


def _is_for_call(x: Any) -> bool:
    """Return whether a program takes a numpy array as it is; others are converted or cached."""
    return isinstance(x, np.ndarray) and x.flags.writeable and x.dtype in _TYPES


@configclass
class Single(BaseParallelConfig):
    """Config of a single device."""

    kind: Literal["single"] = "single"
    devices: Devices = 0
    """The device: 0 for the first; its index, [2]; or cpu, gpu:1."""

    @property
    def splits_state(self) -> bool:
        """False: the device has all of it."""
        return False

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return none: every other layout is compared with one device."""
        del counts, dims
        return {}

    def build(self, among: Sequence[Device] | None = None) -> OneDevice:
        """Build the strategy of the device, or of one of `among`.

        Raises:
            ShardingError: in several processes, each of which would train by itself.
            ConfigError: if `devices` is not one device.
        """
        split_cpu(self.devices)  # before the next line starts JAX's devices
        if jax.process_count() > 1:
            raise ShardingError(
                "parallel.kind=single runs in one process, and this run has "
                f"{jax.process_count()}. Take parallel.kind=mirrored: the same steps over all of "
                f"them."
            )
        return OneDevice(one_device(self.devices, among))
