"""Parsing of `parallel.devices`: a number of devices, their indices, or their names."""

import dataclasses
import re
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

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
        ValueError: for a value that is no number of devices, no list of indices and no name.
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
