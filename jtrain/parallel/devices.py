"""Selection of the devices of a run."""

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jtrain.distributed.cluster.cluster import NUMBER, sets_cpu_devices
from jtrain.distributed.cpu_threads import release_pool_variable, size_thread_pool
from jtrain.errors import ConfigError
from jtrain.parallel.device_names import Devices, DeviceSelection, format_devices, parse_devices

Device: TypeAlias = Any  # a jax.Device
DATA = "data"  # the mesh axis of replicas of the state, each with a shard of the rows


def devices(
    asked: Devices, among: Sequence[Device] | None = None, instead: str = ""
) -> list[Device]:
    """Return the requested devices of every process; `split_cpu` is called first.

    Args:
        asked: a number of devices of each process, 0 for all; their indices among the devices of
            each process; a platform, or platforms with indices.
        among: devices to compile for instead of those of this machine.
        instead: advice if there are fewer devices; empty: their number.

    Raises:
        ConfigError: if there are no such devices.
    """
    choice = parse_devices(asked)
    available = _present(asked, choice) if among is None else _check_platform(asked, choice, among)
    release_pool_variable()
    found = []
    for process in sorted({device.process_index for device in available}):
        own = [device for device in available if device.process_index == process]
        found += _of_process(own, asked, choice, instead)
    return found


def split_cpu(asked: Devices) -> None:
    """Split the CPU into the requested number of devices, if no JAX backend runs yet.

    Environment variables that set their number have precedence. XLA gets the threads for them.
    """
    choice = parse_devices(asked)
    needed = max(choice.count, *(index + 1 for index in choice.indices), 0)
    number: Any = jax.config
    size_thread_pool(max(needed, number.jax_num_cpu_devices))
    if needed and choice.platform in ("", "cpu") and not sets_cpu_devices(os.environ):
        # Once a backend runs, the number of devices cannot change.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", needed)


def compute_capability(device: Device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, such as (9, 0); None for other devices."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if device.platform == "gpu" and found else None


def one_device(asked: Devices, among: Sequence[Device] | None = None) -> Device:
    """Return the one requested device; the first for 0 and for a platform.

    Raises:
        ConfigError: as `devices`, and if several are requested.
    """
    choice = parse_devices(asked)
    if choice.count > 1:
        raise ConfigError(
            f"parallel.kind=single takes one device, and parallel.devices={asked} is a number of "
            f"them. To take the device with index {asked} write parallel.devices=[{asked}]; to "
            f"take {asked} devices, parallel.kind=mirrored."
        )
    if len(choice.indices) > 1:
        raise ConfigError(
            f"parallel.kind=single takes one device, and parallel.devices="
            f"{format_devices(asked)} names {len(choice.indices)}. Name one of "
            f"them, or take all with parallel.kind=mirrored."
        )
    return devices(asked, among)[0]


def _present(asked: Devices, choice: DeviceSelection) -> list[Device]:
    """Return all devices of the platform, in every process."""
    split_cpu(asked)
    if not choice.platform:
        return jax.devices()
    try:
        return jax.devices(choice.platform)
    except RuntimeError as error:
        have = jax.devices()
        raise ConfigError(
            f"parallel.devices={format_devices(asked)}, and JAX reaches no "
            f"{choice.platform} here: it has {len(have)} x "
            f"{have[0].platform} ({have[0].device_kind}). Take "
            f"parallel.devices={have[0].platform}, or install JAX for that platform "
            f"(docs/accelerators.md)."
        ) from error


def _check_platform(
    asked: Devices, choice: DeviceSelection, among: Sequence[Device]
) -> list[Device]:
    if choice.platform not in ("", among[0].platform):
        raise ConfigError(
            f"parallel.devices={format_devices(asked)}, and the devices to compile for are "
            f"{among[0].platform} ({among[0].device_kind}). Take parallel.devices=0 for all."
        )
    return list(among)


def _of_process(
    local: list[Device], asked: Devices, choice: DeviceSelection, instead: str
) -> list[Device]:
    """Return the requested devices of one process."""
    if not choice.indices:
        if choice.count > len(local):
            take = instead or f"parallel.devices={len(local)}, or 0 for all"
            raise _too_few(local, asked, choice.count, take)
        return local[: choice.count or None]
    if max(choice.indices) >= len(local):
        take = instead or f"parallel.devices=0, or indices up to {len(local) - 1}"
        raise _too_few(local, asked, max(choice.indices) + 1, take)
    return [local[index] for index in choice.indices]


def _too_few(local: list[Device], asked: Devices, needed: int, take: str) -> ConfigError:
    if number := os.environ.get(NUMBER):
        forced = (
            f"; or set {NUMBER}={needed} in place of {number}: jtrain launch does so "
            f"with --devices {needed}"
        )
    else:
        forced = (
            f"; on a CPU set it before JAX starts, or by "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    return ConfigError(
        f"parallel.devices={format_devices(asked)}, and each process has {len(local)} "
        f"({local[0].device_kind}). Take {take}"
        f"{forced if local[0].platform == 'cpu' else ''}."
    )
