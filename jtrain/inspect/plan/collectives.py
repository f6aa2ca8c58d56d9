"""What a compiled step sends between devices: bytes by kind and mesh axis, loops counted."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.inspect.plan.hlo import ExecutedInstruction, HloError, HloProgram, Instruction, sizes
from jtrain.inspect.plan.replica_groups import replica_groups

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


# What reading text raises that is written otherwise than it is known here.
NOT_UNDERSTOOD = (HloError, LookupError, ValueError, TypeError)


class Collective(NamedTuple):
    """One of the program's, with all its turns."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, that its devices lie along
    sent: int  # bytes that each device sends in all turns, the ring's way
    times: int
    where: str  # in the traced program: jit(step)/jvp()/while/body/dot_general


class CollectiveTraffic(NamedTuple):
    """What a program sends between devices."""

    collectives: tuple[Collective, ...]
    unread: tuple[str, ...] = ()  # what the program's text did not tell, in words


def collectives(text: str, mesh: Mapping[str, int]) -> CollectiveTraffic:
    """Return the collectives of a program that was compiled for the devices of a mesh.

    What each device sends, of an array of B bytes among n devices: a gather of it, a scatter or an
    exchange (n - 1) / n B, a reduction twice that, a permutation B. One that the compiler wrote in
    pieces counts once, where it begins: in the outermost loop. A collective that cannot be
    understood is left out of the sums, and named in `unread`; nothing is raised.
    """
    try:
        program = HloProgram(text)
        runs = _begun(program)
    except NOT_UNDERSTOOD as error:
        return CollectiveTraffic((), (f"no collective: {_said(error)}",))
    found, unread, uncounted = [], [], 0
    for run in runs:
        try:
            one = _collective(run, program, mesh)
        except NOT_UNDERSTOOD as error:
            unread.append(f"one {run.instruction.operation}: {_said(error)}")
            continue
        if one is not None:
            found.append(one)
            uncounted += not run.counted
    if uncounted:
        unread.append(
            f"how often {uncounted} of the collectives run, in loops whose number of turns the "
            f"program does not say: they count as one turn"
        )
    return CollectiveTraffic(tuple(found), tuple(dict.fromkeys(unread)))


def _said(error: Exception) -> str:
    if isinstance(error, HloError):
        return str(error)
    return f"the text is written in a way that is not known ({type(error).__name__}: {error})"


def _begun(program: HloProgram) -> list[ExecutedInstruction]:
    """Return the runs of collectives; those that are one in several pieces by the first."""
    seen: dict[str, ExecutedInstruction] = {}
    for run in program.walk():
        instruction = _between_slices(run.instruction)
        if instruction.operation.removesuffix("-start") not in KINDS:
            continue
        # A piece of one that is run beside other work says which chain of pieces it is of.
        chain = re.search(r"channel_id=(\d+).*chain_id=", instruction.attributes)
        key = chain[1] if chain else f"{run.within} {instruction.name}"
        if key not in seen or run.times < seen[key].times:
            seen[key] = run._replace(instruction=instruction)
    return list(seen.values())


def _collective(
    run: ExecutedInstruction, program: HloProgram, mesh: Mapping[str, int]
) -> Collective | None:
    """Return what a run sends; None in a group of one device, which sends nothing."""
    instruction = _scattered(run.instruction, program, run.within)
    kind = instruction.operation.removesuffix("-start")
    axes, count = _along(instruction, mesh)
    if count == 1:
        return None
    where = re.search(r'op_name="([^"]*)"', instruction.attributes)
    sent = run.times * _sent(kind, instruction, count)
    return Collective(kind, axes, sent, run.times, where[1] if where else "")


def by_axes(found: Sequence[Collective]) -> dict[str, dict[str, int]]:
    """Bytes that each device sends in a step, by the axes it sends along and by kind."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for each in found:
        table[" x ".join(each.axes) or "other"][each.kind] += each.sent
    return {axes: dict(kinds) for axes, kinds in table.items()}


def _between_slices(instruction: Instruction) -> Instruction:
    """What is sent to other slices of TPUs, as the collective that it is a part of."""
    said = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if instruction.operation != "send" or said is None:
        return instruction
    kind, shape = said[1].lower().replace("_", "-"), instruction.shape.split("u32[]")[0]
    return instruction._replace(operation=kind, shape=shape)


def _scattered(instruction: Instruction, program: HloProgram, within: str) -> Instruction:
    """Return a reduction of which only parts are kept as the scatter that it is.

    So the TPU compiler writes them: a fusion of an all-reduce, of one array or of several, and a
    slice of each, run as one.
    """
    root, computation = program.roots.get(within), program.computations[within]
    if instruction.operation != "all-reduce" or root is None:
        return instruction
    results = [computation[name] for name in root.operands] if root.operation == "tuple" else [root]
    if results and all(_slices(instruction, result, computation) for result in results):
        return instruction._replace(operation="reduce-scatter", shape=root.shape)
    return instruction


def _slices(of: Instruction, result: Instruction, within: Mapping[str, Instruction]) -> bool:
    """Return whether `result` is a part of what `of` gives, or of one of the arrays it gives."""
    if result.operation != "dynamic-slice":
        return False
    sliced = within[result.operands[0]]
    if sliced.operation == "get-tuple-element":
        sliced = within[sliced.operands[0]]
    return sliced.name == of.name


def _sent(kind: str, instruction: Instruction, count: int) -> int:
    """Bytes that a device sends in one turn."""
    arrays = [size for size in sizes(instruction.shape) if size > 4] or sizes(instruction.shape)
    if instruction.operation.endswith("-start") and kind in {"all-gather", "collective-permute"}:
        # (what is given, what comes, ...): only what comes counts.
        arrays = [max(arrays)] if len(arrays) < 4 else arrays[len(arrays) // 2 :]
    whole = sum(arrays)
    if kind == "collective-permute":
        return whole
    if kind == "reduce-scatter":
        return whole * (count - 1)
    share = whole * (count - 1) // count
    return 2 * share if kind == "all-reduce" else share


def _along(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the axes that the devices of one group differ in, and how many devices it has."""
    if "_xla_megascale_target" in instruction.attributes:
        return ("slice",), mesh.get("slice", 1)
    groups, devices = replica_groups(instruction.attributes), math.prod(mesh.values())
    members = np.asarray(groups[0] if groups is not None else np.arange(devices))
    if members.max() >= devices:
        raise HloError(f"its devices reach to {members.max()}, and the mesh has {devices}")
    places = np.unravel_index(members, tuple(mesh.values()))
    axes = tuple(axis for axis, at in zip(mesh, places, strict=True) if len(set(at.tolist())) > 1)
    return axes, len(members)
