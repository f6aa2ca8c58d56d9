"""The devices of a run."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jtrain.cluster import cpu_devices
from jtrain.errors import ConfigError

Device: TypeAlias = Any  # a jax.Device
DATA = "data"  # the mesh axis of copies of the state, each with its part of the rows


def devices(count: int, among: Sequence[Device] | None = None, instead: str = "") -> list[Device]:
    """`count` devices of each process, all of them if 0; a CPU is cut into as many as are asked.

    `among`: devices that stand in for those of this machine, to compile for them. `instead`: what
    to type where there are fewer; by default their number.

    Raises:
        ConfigError: if there are fewer.
    """
    if among is not None:
        return _first(list(among), count)
    if count and not cpu_devices.is_said(os.environ):
        # Too late once a backend runs; then there are as many as there are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices()
    if not count:
        return found
    here = jax.local_device_count()
    if count > here:
        raise ConfigError(
            f"parallel.devices={count}, and each process has {here} ({found[0].device_kind}). Take "
            f"{instead or f'parallel.devices={here}, or 0 for all'}; on a CPU set it before JAX "
            f"starts, or by "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return _first(found, count)


def _first(found: list[Device], count: int) -> list[Device]:
    processes = sorted({device.process_index for device in found})
    of = lambda process: [device for device in found if device.process_index == process]
    return [d for p in processes for d in of(p)[: count or None]]
