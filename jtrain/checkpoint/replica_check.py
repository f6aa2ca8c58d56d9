"""Replica check: detects devices whose replicas of a leaf differ.

Each device has the sums of a fingerprint, computed from its own data: replicas from their own copy,
shards from the devices that they were summed with. So replicas that have diverged, by a flipped bit
in the memory or arithmetic of one device, are detected at no more cost than reading the sums of all
devices (shown by tests/checkpoint).
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jtrain.checkpoint import fingerprint
from jtrain.errors import DeviceError
from jtrain.io.regular_files import read_json

ReplicaPrints: TypeAlias = dict[str, dict[str, list[str]]]  # leaf -> fingerprint -> devices
NAMED = 3  # leaves in an error message
_COPIES = "copies-"


def local_prints(pending: fingerprint.PendingSums) -> ReplicaPrints:
    """Return the fingerprints of each leaf on this process's devices, with the devices of each."""
    replicas = [
        (names, device, sums)
        for names, sums_on_devices in pending
        for device, sums in _replicas(sums_on_devices)
    ]
    values = jax.device_get([sums for *_, sums in replicas])
    found: ReplicaPrints = {}
    for (names, device, _), sums in zip(replicas, values, strict=True):
        for name, pair in zip(names, sums, strict=True):
            found.setdefault(name, {}).setdefault(fingerprint.format_sums(*pair), []).append(device)
    return found


def write_prints(folder: Path, found: ReplicaPrints) -> None:
    """Write the fingerprints of this process for the first one, their digest in the file's name."""
    (folder / f"{_COPIES}{_digest(found)}.{jax.process_index()}").write_text(json.dumps(found))


def read_all_prints(folder: Path, own: ReplicaPrints) -> ReplicaPrints:
    """Return the fingerprints of all processes, and remove their files.

    Files with the same digest as that of this process, `own`, are not read.

    Raises:
        FileNotFoundError: if a file is missing: the file system does not show it here yet.
    """
    files = list(folder.glob(f"{_COPIES}*"))
    if len(files) != jax.process_count():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder / _COPIES}*")
    if all(file.stem == f"{_COPIES}{_digest(own)}" for file in files):
        found = own
    else:
        found = _merge(read_json(file, inside=folder) for file in files)
    for file in files:
        file.unlink()
    return found


def _digest(found: ReplicaPrints) -> str:
    text = json.dumps({name: sorted(prints) for name, prints in sorted(found.items())})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_replicas(found: ReplicaPrints, step: int) -> dict[str, str]:
    """Return the fingerprint of each leaf.

    Raises:
        DeviceError: if some devices differ from the others, with their names.
    """
    differing = {name: prints for name, prints in found.items() if len(prints) > 1}
    if differing:
        text = "; ".join(
            _describe(name, prints) for name, prints in list(differing.items())[:NAMED]
        )
        more = f" (and {len(differing) - NAMED} more leaves)" if len(differing) > NAMED else ""
        raise DeviceError(
            f"step {step}: replicas of a leaf differ between devices. {text}{more}. A bit has "
            f"flipped in memory or arithmetic. The step was not saved; earlier checkpoints are "
            f"valid. Run again to resume from the newest, without a device that is named twice."
        )
    return {name: next(iter(prints)) for name, prints in found.items()}


def _describe(leaf: str, prints: Mapping[str, list[str]]) -> str:
    ranked = sorted(prints.items(), key=lambda pair: len(pair[1]))
    total = sum(map(len, prints.values()))
    (fewest, odd), (_, others) = ranked[0], ranked[-1]
    if len(odd) == len(others):
        return f"{leaf}: {_join(odd)} against {_join(others)}"
    return f"{leaf}: {_join(odd)} of {total} devices ({fewest})"


def _join(devices: list[str]) -> str:
    return ", ".join(devices[:4]) + (", ..." if len(devices) > 4 else "")


def _replicas(sums: Any) -> list[tuple[str, Any]]:
    """Return the replicas of these sums, each with the name of its device or host."""
    if not isinstance(sums, jax.Array):
        return [(f"the host of process {jax.process_index()}", sums)]
    name = lambda device: f"{device.platform}:{device.id} of process {device.process_index}"
    return [(name(shard.device), shard.data) for shard in sums.addressable_shards]


def _merge(tables: Iterable[ReplicaPrints]) -> ReplicaPrints:
    found: ReplicaPrints = {}
    for table in tables:
        for name, prints in table.items():
            merged = found.setdefault(name, {})
            for print_, devices in prints.items():
                merged.setdefault(print_, []).extend(devices)
    return found
