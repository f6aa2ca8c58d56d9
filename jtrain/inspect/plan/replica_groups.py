"""Replica groups: the devices of a collective, parsed from each of XLA's formats."""

import math
import re
from collections.abc import Sequence

import numpy as np

from jtrain.inspect.plan.hlo import HloError

PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
LISTS = re.compile(r"replica_groups=(\{\{.*?\}\})")
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")
AXIS = re.compile(r"'?([\w.]+)'?=(\d+)")
PART = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")


def parse_replica_groups(attributes: str) -> np.ndarray | list[list[int]] | None:
    """Return the groups of a collective, as device positions in mesh order; None: one group of all.

    A permutation gives one group: the devices that an array of the first device passes through.

    Args:
        attributes: the text after the operands of the instruction.

    Raises:
        HloError: if the groups have an unknown format.

    Sources: openxla/xla, xla/hlo/ir/replica_group.cc and mesh_and_axis.cc, for the formats
    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,4]<=[4,2]T(1,0)` and `mesh['a'=2,'b'=4] {'a','b':(1)2}`.
    """
    if pairs := PAIRS.search(attributes):
        return [_cycle(_lists(pairs[1]))]
    if "replica_groups=" not in attributes or "replica_groups={}" in attributes:
        return None
    if lists := LISTS.search(attributes):
        return _lists(lists[1])
    if mesh := MESH.search(attributes):
        return _mesh_groups(mesh[1], mesh[2])
    text = attributes[attributes.index("replica_groups=") + len("replica_groups=") :]
    if iota := IOTA.match(text):
        return _iota(iota)
    raise HloError(f"its replica_groups={text[:60]} have an unknown format")


def _mesh_groups(axes: str, along: str) -> np.ndarray:
    """Return the groups along mesh axes, or along parts of axes: `'b':(2)4`."""
    named, _, device_order = axes.partition(", device_ids=")
    sizes = {name: int(size) for name, size in AXIS.findall(named)}
    ids = _device_ids(device_order, tuple(sizes.values()))
    dims: dict[tuple[str, int], int] = {(name, 1): size for name, size in sizes.items()}
    last = []
    for name, before, size in PART.findall(along):
        if name not in sizes:
            raise HloError(f"its groups name {name!r}, which is no axis of mesh[{axes}]")
        start, length = int(before or 1), int(size or sizes[name])
        _split(dims, name, start)
        _split(dims, name, start * length)
        within = range(start, start * length)
        last += [part for part in sorted(dims) if part[0] == name and part[1] in within]
    order = sorted(dims, key=lambda part: (list(sizes).index(part[0]), part[1]))
    others = [part for part in order if part not in last]
    ids = ids.reshape([dims[part] for part in order])
    ids = ids.transpose([order.index(part) for part in (*others, *last)])
    return ids.reshape(-1, math.prod(dims[part] for part in last))


def _split(dims: dict[tuple[str, int], int], name: str, at: int) -> None:
    """Split the part of an axis that contains position `at`."""
    for (axis, start), size in list(dims.items()):
        if axis == name and start < at < start * size:
            if at % start or size % (at // start):
                raise HloError(f"its part of the axis {name!r} does not divide it")
            dims[axis, start] = at // start
            dims[axis, at] = size // (at // start)


def _device_ids(order: str, shape: Sequence[int]) -> np.ndarray:
    """Return the devices of a mesh: in order, or in the order of `device_ids=(...)`."""
    ids = np.arange(math.prod(shape))
    if order:
        iota = IOTA.search(order)
        ids = _iota(iota) if iota else np.array([int(n) for n in re.findall(r"\d+", order)])
    if ids.size != math.prod(shape):
        raise HloError(f"its mesh has {math.prod(shape)} devices, and names {ids.size}")
    return ids.reshape(shape)


def _iota(found: re.Match[str]) -> np.ndarray:
    shape, over, order = found.groups()
    ids = np.arange(math.prod(_ints(over))).reshape(_ints(over))
    ids = ids.transpose(_ints(order)) if order else ids
    return ids.reshape(_ints(shape))


def _cycle(pairs: list[list[int]]) -> list[int]:
    """Return the devices that an array of the first device passes through, in order."""
    target_of = {source: target for source, target in pairs}
    device, passed = pairs[0][0], []
    while device in target_of and device not in passed:
        passed.append(device)
        device = target_of[device]
    return passed if device in passed else [*passed, device]


def _lists(text: str) -> list[list[int]]:
    return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
