"""Selection of the devices of a run: a number of devices, their indices, or their names."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import jax
from pydantic import BeforeValidator

from jtrain.distributed.cluster.cluster import NUMBER, sets_cpu_devices
from jtrain.distributed.cpu_threads import release_pool_variable, size_thread_pool
from jtrain.errors import ConfigError

# As TensorFlow spells them, too: GPU:1, /gpu:1, /device:GPU:1.
NAMED = re.compile(r"/?(?:device:)?([a-z]\w*?)(?::(\d+))?", re.IGNORECASE)
ALL = 0


@dataclasses.dataclass(frozen=True)
class DeviceSelection:
    """The parsed value of `parallel.devices`."""

    platform: str  # empty: the default platform of JAX
    count: int  # devices of each process; ALL unless a number is given
    indices: tuple[int, ...]  # among the devices of each process; empty unless some are named


def parse_devices(written: Any) -> DeviceSelection:
    """Return the selection that `parallel.devices` describes.

    Raises:
        ValueError: for a value that is neither a number of devices, a list of indices nor a name.
    """
    if isinstance(written, int) and not isinstance(written, bool):
        if written < 0:
            raise _wrong("must be at least 0", written)
        return DeviceSelection("", written, ())
    if not isinstance(written, str | list | tuple):
        raise _wrong("must say devices", written)
    items = [written] if isinstance(written, str) else written
    named = [_named(item, written) for item in items]
    if not named:
        raise _wrong("must name a device", written)
    platforms = list(dict.fromkeys(platform for platform, _ in named if platform))
    indices = tuple(index for _, index in named if index is not None)
    if len(platforms) > 1:
        raise _wrong("must be devices of one platform", written)
    if len(set(indices)) < len(indices):
        raise _wrong("must name each device once", written)
    if len(indices) < len(named) and len(named) > 1:
        raise _wrong("must be a whole platform, or devices of it", written)
    return DeviceSelection(platforms[0] if platforms else "", ALL, indices)


def format_devices(written: Any) -> str:
    """Return devices as they are typed on a command line: `[0,2]`."""
    if isinstance(written, list | tuple):
        return f"[{','.join(map(str, written))}]"
    return str(written)


def _named(item: Any, written: Any) -> tuple[str, int | None]:
    """Return the platform and the index of one device; the index is None for all of a platform."""
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return "", item
    found = NAMED.fullmatch(item) if isinstance(item, str) else None
    if found is None:
        raise _wrong(f"must name devices, and {item!r} is none", written)
    return found[1].lower(), None if found[2] is None else int(found[2])


def _wrong(why: str, written: Any) -> ValueError:
    return ValueError(
        f"{why}, found {format_devices(written)}. Write how many, 0 for all; their indices, "
        f"such as [0,2]; or a platform, such as cpu or gpu:1"
    )


def _checked(written: Any) -> Any:
    parse_devices(written)
    return tuple(written) if isinstance(written, list) else written


Devices: TypeAlias = Annotated[int | str | tuple[int | str, ...], BeforeValidator(_checked)]
"""The type of a field `devices`: 4, [0, 2], "cpu", "gpu:1" or ["gpu:0", "gpu:1"]."""


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
