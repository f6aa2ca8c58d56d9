"""Check of a config against devices that are not here, without a compiler."""

import dataclasses
import math

from jtrain.errors import ConfigError
from jtrain.parallel import Auto, check_divides
from jtrain.train.experiment import RunConfig


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """A device by its place: as much of a JAX device as layouts look at."""

    id: int
    process_index: int
    slice_index: int
    platform: str
    device_kind: str = "absent"

    def addressable_memories(self) -> list:
        """Return no memories."""
        return []


def check_fills(
    config: RunConfig, topology: str, *, platform: str, slices: int, hosts: int, devices: int
) -> None:
    """Raise unless a run uses all devices of a topology, with as many rows on each.

    A layout that is chosen at the start (parallel.kind=auto) fits any number of devices.

    Args:
        hosts: of each slice, with one process each.
        devices: of each host.

    Raises:
        ConfigError: with what to change.
    """
    if isinstance(config.parallel, Auto):
        return
    places = [(s, h) for s in range(slices) for h in range(hosts) for _ in range(devices)]
    absent = [AbsentDevice(i, s * hosts + h, s, platform) for i, (s, h) in enumerate(places)]
    try:
        strategy = config.parallel.build(absent)
        check_divides(config.batch, strategy.shares, config.microbatches)
        check_divides(
            config.evaluate.batch or config.batch, strategy.shares, 1, name="evaluate.batch"
        )
    except ConfigError as error:
        raise ConfigError(f"{topology} has {len(absent)} devices. {error}") from error
    used = math.prod(strategy.axes.values()) if strategy.axes else 1
    if used < len(absent):
        raise ConfigError(
            f"{topology} has {len(absent)} devices, and parallel.kind={config.parallel.kind} uses "
            f"{used} of them. Write parallel.kind=fsdp parallel.devices=0, which uses all."
        )
