"""Collectives of a compiled step: bytes by kind and mesh axis, with all turns of loops."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.inspect.plan.hlo import (
    ExecutedInstruction,
    HloError,
    HloProgram,
    Instruction,
    array_sizes,
)
from jtrain.inspect.plan.replica_groups import parse_replica_groups

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
    times: int
    where: str  # name stack: jit(step)/jvp()/while/body/dot_general
    key: str = ""  # the name that `CollectiveFinder` knows it by
    overlapped: bool = False  # the program computes while it runs


class CollectiveTraffic(NamedTuple):
    """The collectives of a program."""

    collectives: tuple[Collective, ...]
    unread: tuple[str, ...] = ()  # descriptions of collectives that could not be read


def read_collectives(text: str, mesh: Mapping[str, int]) -> CollectiveTraffic:
    """Return the collectives of a program compiled for the devices of a mesh.

    For an array of B bytes on n devices each device sends (n - 1) / n B in an all-gather, a
    reduce-scatter or an all-to-all, twice that in an all-reduce, and B in a permutation. A
    collective that the compiler split into pieces counts once, at its first piece in the outermost
    loop. A collective in an unknown format is named in `unread` and not counted; nothing is raised.
    """
    try:
        return collectives_of(HloProgram(text), mesh)
    except NOT_UNDERSTOOD as error:
        return CollectiveTraffic((), (f"no collective: {reason(error)}",))


def collectives_of(program: HloProgram, mesh: Mapping[str, int]) -> CollectiveTraffic:
    """Return the collectives of a parsed program; see `read_collectives`.

    Raises:
        HloError: if the program has an unknown format.
    """
    runs = _executed(program)
    found, unread, uncounted = [], [], 0
    for run in runs:
        try:
            collective = find_collective(run, program, mesh)
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


def _executed(program: HloProgram) -> list[ExecutedInstruction]:
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
    """Return the collective that an instruction is or begins; None for other instructions."""
    instruction = _as_slice_collective(instruction)
    return instruction if instruction.operation.removesuffix("-start") in KINDS else None


def collective_key(within: str, instruction: Instruction) -> str:
    """Return a name for a collective, the same for all pieces of one."""
    # A piece of an asynchronous collective names the chain of pieces that it belongs to.
    chain = re.search(r"channel_id=(\d+).*chain_id=", instruction.attributes)
    return chain[1] if chain else f"{within} {instruction.name}"


def find_collective(
    run: ExecutedInstruction, program: HloProgram, mesh: Mapping[str, int]
) -> Collective | None:
    """Return the collective of an executed instruction; None in a group of one device."""
    instruction = _as_reduce_scatter(run.instruction, program, run.within)
    kind = instruction.operation.removesuffix("-start")
    axes, count = _mesh_axes(instruction, mesh)
    if count == 1:
        return None
    where = re.search(r'op_name="([^"]*)"', instruction.attributes)
    sent = run.times * _sent_bytes(kind, instruction, count)
    key = collective_key(run.within, instruction)
    return Collective(kind, axes, sent, run.times, where[1] if where else "", key)


def sum_by_axes(found: Sequence[Collective]) -> dict[str, dict[str, int]]:
    """Return the bytes that each device sends in a step, by mesh axes and kind."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for collective in found:
        table[" x ".join(collective.axes) or "other"][collective.kind] += collective.sent
    return {axes: dict(kinds) for axes, kinds in table.items()}


def _as_slice_collective(instruction: Instruction) -> Instruction:
    """Return a send to other TPU slices as the collective that it belongs to."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if instruction.operation != "send" or transfer is None:
        return instruction
    kind, shape = transfer[1].lower().replace("_", "-"), instruction.shape.split("u32[]")[0]
    return instruction._replace(operation=kind, shape=shape)


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
    arrays = [size for size in array_sizes(instruction.shape) if size > 4] or array_sizes(
        instruction.shape
    )
    if instruction.operation.endswith("-start") and kind in {"all-gather", "collective-permute"}:
        # (inputs, outputs, ...): only the outputs count.
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
