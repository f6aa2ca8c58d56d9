"""Collectives of a compiled step: bytes by kind and mesh axis, with all turns of loops."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.inspect.plan.hlo import (
    ExecutedInstruction,
    HloError,
    HloProgram,
    Instruction,
    array_sizes,
)

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


# Errors raised by text in an unknown format.
NOT_UNDERSTOOD = (HloError, LookupError, ValueError, TypeError)


class Collective(NamedTuple):
    """A collective of the program, with all its executions."""

    kind: str
    axes: tuple[str, ...]  # mesh axes that its devices differ in
    sent: int  # bytes that each device sends in all turns, by the ring algorithm
    times: int = 1
    where: str = ""  # name stack: jit(step)/jvp()/while/body/dot_general
    key: str = ""  # the name that `CollectiveFinder` knows it by
    overlapped: bool = False  # the program computes while it runs
    direction: str = ""  # of a ring of permutations, + or -: each has links of its own

    @property
    def link(self) -> str:
        """Name of its links: collectives of other links run at the same time."""
        return " x ".join(self.axes) + self.direction


class CollectiveTraffic(NamedTuple):
    """The collectives of a program."""

    collectives: tuple[Collective, ...]
    unread: tuple[str, ...] = ()  # descriptions of collectives that could not be read


def collectives_of(program: HloProgram, mesh: Mapping[str, int]) -> CollectiveTraffic:
    """Return the collectives of a program compiled for the devices of a mesh.

    For an array of B bytes on n devices each device sends (n - 1) / n B in an all-gather, a
    reduce-scatter or an all-to-all, twice that in an all-reduce, and B in a permutation. A
    collective that the compiler split into pieces counts once, at its first piece in the outermost
    loop. A collective in an unknown format is named in `unread` and not counted.

    Raises:
        HloError: if the program has an unknown format.
    """
    runs = _first_pieces(program)
    found, unread, uncounted = [], [], 0
    for run in runs:
        try:
            collective = read_collective(run, program, mesh)
        except NOT_UNDERSTOOD as error:
            unread.append(f"one {run.instruction.operation}: {reason(error)}")
            continue
        if collective is not None:
            found.append(collective)
            uncounted += not run.counted
    if uncounted:
        unread.append(
            f"how often {uncounted} of the collectives run, in loops with an unknown number of "
            f"turns: they count as one turn"
        )
    return CollectiveTraffic(tuple(found), tuple(dict.fromkeys(unread)))


def reason(error: Exception) -> str:
    """Return why a text could not be read."""
    if isinstance(error, HloError):
        return str(error)
    return f"the text has an unknown format ({type(error).__name__}: {error})"


def _first_pieces(program: HloProgram) -> list[ExecutedInstruction]:
    """Return the executed collectives; one in several pieces is represented by the first."""
    first_runs: dict[str, ExecutedInstruction] = {}
    for run in program.walk():
        instruction = as_collective(run.instruction)
        if instruction is None:
            continue
        key = collective_key(run.within, instruction)
        if key not in first_runs or run.times < first_runs[key].times:
            first_runs[key] = run._replace(instruction=instruction)
    return list(first_runs.values())


def as_collective(instruction: Instruction) -> Instruction | None:
    """Return the collective that an instruction is or begins, also to other TPU slices, or None."""
    kind = instruction.quoted("_xla_megascale_transfer_type").lower().replace("_", "-")
    if instruction.operation == "send" and kind:
        shape = instruction.shape.split("u32[]")[0]
        instruction = instruction._replace(operation=kind, shape=shape)
    return instruction if instruction.operation.removesuffix("-start") in KINDS else None


def collective_key(within: str, instruction: Instruction) -> str:
    """Return a name for a collective, the same for all pieces of one."""
    # A piece of an asynchronous collective names a chain, whose pieces have one channel.
    channel = re.search(r"channel_id=(\d+).*chain_id=", instruction.attributes)
    return channel[1] if channel else f"{within} {instruction.name}"


def read_collective(
    run: ExecutedInstruction, program: HloProgram, mesh: Mapping[str, int]
) -> Collective | None:
    """Return the collective of an executed instruction; None in a group of one device."""
    instruction = _as_reduce_scatter(run.instruction, program, run.within)
    kind = instruction.operation.removesuffix("-start")
    axes, count = _mesh_axes(instruction, mesh)
    if count == 1:
        return None
    sent = run.times * _sent_bytes(kind, instruction, count)
    key, direction = collective_key(run.within, instruction), ""
    if kind == "collective-permute":
        direction = " +" if is_forward(instruction.attributes) else " -"
    where = instruction.quoted("op_name")
    return Collective(kind, axes, sent, run.times, where, key, direction=direction)


class CollectiveRow(NamedTuple):
    """Collectives of one kind over the same axes."""

    axes: tuple[str, ...]
    kind: str
    times: int
    """Executions in a step."""
    sent: int
    """Bytes that each device sends."""
    overlapped: int
    """Bytes of `sent` in collectives that run beside computation."""
    module: str = ""
    """The module that they are of, in a table by modules."""


def collective_table(
    found: Sequence[Collective], module: Callable[[str], str] = lambda where: ""
) -> list[CollectiveRow]:
    """Return a row for each kind of collective and its axes, most bytes first.

    Args:
        module: returns the module of a name stack, for rows by module.
    """
    rows: dict[tuple, CollectiveRow] = {}
    for each in found:
        key = (each.axes, each.kind, module(each.where))
        row = rows.get(key, CollectiveRow(each.axes, each.kind, 0, 0, 0, key[2]))
        rows[key] = row._replace(
            times=row.times + each.times,
            sent=row.sent + each.sent,
            overlapped=row.overlapped + each.sent * each.overlapped,
        )
    return sorted(rows.values(), key=lambda row: -row.sent)


def _as_reduce_scatter(instruction: Instruction, program: HloProgram, within: str) -> Instruction:
    """Return an all-reduce with sliced results as a reduce-scatter.

    The TPU compiler writes a reduce-scatter as a fusion of an all-reduce, of one or several arrays,
    and a slice of each.
    """
    root, computation = program.roots.get(within), program.computations[within]
    if instruction.operation != "all-reduce" or root is None:
        return instruction
    results = [computation[name] for name in root.operands] if root.operation == "tuple" else [root]
    if results and all(_slices(instruction, result, computation) for result in results):
        return instruction._replace(operation="reduce-scatter", shape=root.shape)
    return instruction


def _slices(reduction: Instruction, result: Instruction, within: Mapping[str, Instruction]) -> bool:
    """Return whether `result` is a slice of an output of `reduction`."""
    if result.operation != "dynamic-slice":
        return False
    sliced = within[result.operands[0]]
    if sliced.operation == "get-tuple-element":
        sliced = within[sliced.operands[0]]
    return sliced.name == reduction.name


def _sent_bytes(kind: str, instruction: Instruction, count: int) -> int:
    """Return the bytes that a device sends in one execution."""
    sizes = array_sizes(instruction.shape)
    arrays = [size for size in sizes if size > 4] or sizes  # beside u32[], words of the runtime
    if instruction.operation.endswith("-start") and kind in {"all-gather", "collective-permute"}:
        # Only the outputs count: of (inputs, outputs) the second half, of one array the larger.
        arrays = [max(arrays)] if len(arrays) < 4 else arrays[len(arrays) // 2 :]
    total = sum(arrays)
    if kind == "collective-permute":
        return total
    if kind == "reduce-scatter":
        return total * (count - 1)
    part = total * (count - 1) // count
    return 2 * part if kind == "all-reduce" else part


def _mesh_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that the devices of a group differ in, and the size of the group."""
    if "_xla_megascale_target" in instruction.attributes:
        return ("slice",), mesh.get("slice", 1)
    groups, devices = parse_replica_groups(instruction.attributes), math.prod(mesh.values())
    members = np.asarray(groups[0] if groups is not None else np.arange(devices))
    if members.max() >= devices:
        raise HloError(f"it names device {members.max()}, and the mesh has {devices} devices")
    coordinates = np.unravel_index(members, tuple(mesh.values()))
    axes = tuple(
        axis for axis, at in zip(mesh, coordinates, strict=True) if len(set(at.tolist())) > 1
    )
    return axes, len(members)


PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
LISTS = re.compile(r"replica_groups=(\{\{.*?\}\})")
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[(.*?) \{(.*?)\}")
DEVICE_IDS = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
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
    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'a','b':(1)2}` and
    `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`.
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
        return _iota(*iota.groups())
    raise HloError(f"its replica_groups={text[:60]} have an unknown format")


def _mesh_groups(axes: str, along: str) -> np.ndarray:
    """Return the groups along mesh axes, or along parts of axes: `'b':(2)4`."""
    named, _, device_order = axes.partition("device_ids=")
    sizes = {name: int(size) for name, size in AXIS.findall(named)}
    ids = _device_ids(device_order, tuple(sizes.values()))
    dims: dict[tuple[str, int], int] = {(name, 1): size for name, size in sizes.items()}
    last = []
    for name, before, size in PART.findall(along):
        if name not in sizes:
            raise HloError(f"its groups name {name!r}, which is not an axis of mesh[{axes}]")
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
        iota = DEVICE_IDS.search(order)
        listed = lambda: np.array([int(n) for n in re.findall(r"\d+", order)])
        ids = _iota(*iota.groups()) if iota else listed()
    if ids.size != math.prod(shape):
        raise HloError(f"its mesh has {math.prod(shape)} devices, and names {ids.size}")
    return ids.reshape(shape)


def _iota(shape: str, over: str | None, order: str | None) -> np.ndarray:
    sizes = _ints(over or shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    ids = ids.transpose(_ints(order)) if order else ids
    return ids.reshape(_ints(shape))


def _cycle(pairs: list[list[int]]) -> list[int]:
    """Return the devices that an array passes through, in order: the most that one does."""
    target_of = {source: target for source, target in pairs}
    seen: set[int] = set()
    longest: list[int] = []
    for device in target_of:
        passed: list[int] = []
        while device in target_of and device not in seen:
            passed.append(device)
            seen.add(device)
            device = target_of[device]
        if passed and device not in passed:
            passed.append(device)
        longest = max(longest, passed, key=len)
    return longest


def is_forward(attributes: str) -> bool:
    """Return whether a permutation sends to the next device of a ring or row, at any stride."""
    found = PAIRS.search(attributes)
    passed = _cycle(_lists(found[1])) if found else []
    if len(passed) < 2:
        return True
    hop, around = passed[1] - passed[0], passed[-1] - passed[0]
    return (hop > 0) == (abs(hop) <= abs(around))


def _lists(text: str) -> list[list[int]]:
    return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
