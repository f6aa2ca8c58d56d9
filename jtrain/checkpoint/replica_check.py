"""Whether the devices that hold copies of a leaf hold the same one.

The sums of a fingerprint are numbers that each device has a copy of, made from its own copy of the
leaf: replicas each from theirs, the parts of a leaf that is split from those that they were summed
with. So copies that have drifted apart, by a bit that flipped in one device's memory or arithmetic,
are seen for nothing more than reading the sums of all devices (shown by tests/checkpoint).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jtrain.checkpoint import fingerprint
from jtrain.errors import DeviceError
from jtrain.io.regular_files import read_json

Seen: TypeAlias = dict[str, dict[str, list[str]]]  # of each leaf, of each fingerprint who has it
NAMED = 3  # leaves that an error names


def seen(begun: fingerprint.Begun) -> Seen:
    """Of each leaf the fingerprints that this process's devices have, and which have which."""
    copies = [(names, device, sums) for names, all_ in begun for device, sums in _copies(all_)]
    values = jax.device_get([sums for *_, sums in copies])
    found: Seen = {}
    for (names, device, _), sums in zip(copies, values, strict=True):
        for name, two in zip(names, sums, strict=True):
            found.setdefault(name, {}).setdefault(fingerprint.text(*two), []).append(device)
    return found


def tell(folder: Path, found: Seen) -> None:
    """Writes what this process has seen where the first one reads it."""
    (folder / _name(jax.process_index())).write_text(json.dumps(found))


def of_all(folder: Path) -> Seen:
    """What all processes have told, which is removed."""
    files = [folder / _name(process) for process in range(jax.process_count())]
    found = _joined(read_json(file, inside=folder) for file in files)
    for file in files:
        file.unlink()
    return found


def agreed(found: Seen, step: int) -> dict[str, str]:
    """The fingerprint of each leaf.

    Raises:
        DeviceError: if some devices have another than the others, with their names.
    """
    apart = {name: prints for name, prints in found.items() if len(prints) > 1}
    if apart:
        told = "; ".join(_told(name, prints) for name, prints in list(apart.items())[:NAMED])
        more = f" (and {len(apart) - NAMED} more leaves)" if len(apart) > NAMED else ""
        raise DeviceError(
            f"step {step}: devices that hold copies of a leaf hold different ones. {told}{more}. "
            f"A bit has flipped in memory or arithmetic. The step was not saved; the checkpoints "
            f"before it are whole. Run again to go on from the newest, without a device that is "
            f"named twice."
        )
    return {name: next(iter(prints)) for name, prints in found.items()}


def _told(leaf: str, prints: Mapping[str, list[str]]) -> str:
    ranked = sorted(prints.items(), key=lambda pair: len(pair[1]))
    whole = sum(map(len, prints.values()))
    (fewest, odd), (_, others) = ranked[0], ranked[-1]
    if len(odd) == len(others):
        return f"{leaf}: {_some(odd)} against {_some(others)}"
    return f"{leaf}: {_some(odd)} of {whole} devices ({fewest})"


def _some(devices: list[str]) -> str:
    return ", ".join(devices[:4]) + (", ..." if len(devices) > 4 else "")


def _copies(sums: Any) -> list[tuple[str, Any]]:
    """The copies of these sums, each with the name of who has it."""
    if not isinstance(sums, jax.Array):
        return [(f"the host of process {jax.process_index()}", sums)]
    return [(_device(shard.device), shard.data) for shard in sums.addressable_shards]


def _device(device: Any) -> str:
    return f"{device.platform}:{device.id} of process {device.process_index}"


def _name(process: int) -> str:
    return f"copies-{process}.json"


def _joined(every: Iterable[Seen]) -> Seen:
    found: Seen = {}
    for one in every:
        for name, prints in one.items():
            of = found.setdefault(name, {})
            for print_, devices in prints.items():
                of[print_] = of.get(print_, []) + devices
    return found
