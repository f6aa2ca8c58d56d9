"""One device, the same code path: TensorFlow's OneDeviceStrategy."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import SingleDeviceSharding
from jax.stages import Lowered

from jtrain.config.configclass import configclass
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.gradient import NO_SHARDING, GradientSharding
from jtrain.core.types import Batch, Dims, Params
from jtrain.errors import ShardingError
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import Device, one_device
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.strategies.base_config import BaseParallelConfig
from jtrain.parallel.strategies.strategy import PlacedBatchCache, StrategyBase, plain, same_for_all


class OneDevice(StrategyBase):
    """Everything on one device."""

    shares = 1
    part = (0, 1)
    axes: Mapping[str, int] = {}
    psum = None

    def __init__(self, device: Device):
        self._device = SingleDeviceSharding(device)
        self.mesh = make_mesh({}, [device])

    @property
    def placement(self) -> Placement:
        """Nothing to say."""
        return Unplaced()

    def shardings(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Any:
        """All on the device."""
        del dims
        return same_for_all(tree, self._device)

    def decisions(self, tree: Any, dims: Mapping[str, Dims] = {}, /) -> Sequence[LeafSharding]:
        """None: all are on the device."""
        del tree, dims
        return ()

    def gradient_sharding(self, params: Params, dims: Mapping[str, Dims] = {}, /) -> GradientSharding:
        """Nothing is split."""
        del params, dims
        return NO_SHARDING

    def place(self, batch: Batch, /, *, stacked: bool = False) -> Batch:
        """The batch on the device."""
        del stacked
        return self._put(batch)

    @functools.cached_property
    def _put(self) -> PlacedBatchCache:
        return PlacedBatchCache(
            jax.jit(lambda tree: tree, in_shardings=self._device, out_shardings=self._device)
        )

    def lower(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Lowered:
        """`fn` under `jax.jit`."""
        del stacked
        jitted = jax.jit(
            fn,
            in_shardings=self._device,
            out_shardings=self._device,
            donate_argnums=0 if keeps else (),
        )
        return jitted.lower(*plain(state, batch))


@configclass
class Single(BaseParallelConfig):
    """One device."""

    kind: Literal["single"] = "single"
    devices: Devices = 0
    """Which device: 0 for the first; its index, [2]; or cpu, gpu:1."""

    def build(self, among: Sequence[Device] | None = None) -> OneDevice:
        """The strategy over the device, or one `among` others.

        Raises:
            ShardingError: in several processes, which would each train alone.
            ConfigError: if `devices` is several devices or none.
        """
        if jax.process_count() > 1:
            raise ShardingError(
                "parallel.kind=single runs in one process, and this run has "
                f"{jax.process_count()}. Take parallel.kind=mirrored: the same steps over all of "
                f"them."
            )
        return OneDevice(one_device(self.devices, among))
