"""What a compiled step sends between devices: bytes by kind and mesh axis, loops counted."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.plan.hlo import Instruction, Program, sizes

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """One of the program's, with all its turns."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, that its devices lie along
    sent: int  # bytes that each device sends in all turns, the ring's way
    times: int
    where: str  # in the traced program: jit(step)/jvp()/while/body/dot_general


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Those of a program compiled for the devices of a mesh.

    What each device sends, of an array of B bytes among n devices: a gather of it, a scatter or an
    exchange (n - 1) / n B, a reduction twice that, a permutation B. One that the compiler wrote in
    pieces counts once, where it begins: in the outermost loop.
    """
    program = Program(text)
    seen: dict[str, tuple[Instruction, int, str]] = {}
    for line, times, within in program.walk():
        instruction = _between_slices(line)
        if instruction.operation.removesuffix("-start") not in KINDS:
            continue
        # A piece of one that is run beside other work says which chain of pieces it is of.
        chain = re.search(r"channel_id=(\d+).*chain_id=", instruction.attributes)
        key = chain[1] if chain else f"{within} {instruction.name}"
        if key not in seen or times < seen[key][1]:
            seen[key] = instruction, times, within
    found = []
    for instruction, times, within in seen.values():
        instruction = _scattered(instruction, program.computations[within])
        kind = instruction.operation.removesuffix("-start")
        axes, count = _along(instruction, mesh)
        if count > 1:
            where = re.search(r'op_name="([^"]*)"', instruction.attributes)
            sent = times * _sent(kind, instruction, count)
            found.append(Collective(kind, axes, sent, times, where[1] if where else ""))
    return found


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


def _scattered(instruction: Instruction, within: Mapping[str, Instruction]) -> Instruction:
    """A reduction of which only a part is kept as the scatter that it is.

    So the TPU compiler writes them: a fusion of an all-reduce and a slice, run as one.
    """
    root = list(within.values())[-1]
    sliced = root.operation == "dynamic-slice" and root.operands[0] == instruction.name
    if instruction.operation == "all-reduce" and sliced:
        return instruction._replace(operation="reduce-scatter", shape=root.shape)
    return instruction


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
    """The axes that the devices of one group differ in, and how many there are."""
    if "_xla_megascale_target" in instruction.attributes:
        return ("slice",), mesh.get("slice", 1)
    groups = _groups(instruction.attributes)
    members = groups[0] if groups is not None else np.arange(math.prod(mesh.values()))
    places = np.unravel_index(np.asarray(members), tuple(mesh.values()))
    axes = tuple(axis for axis, at in zip(mesh, places, strict=True) if len(set(at.tolist())) > 1)
    return axes, len(members)


def _groups(attributes: str) -> np.ndarray | list[list[int]] | None:
    """The groups of devices by their place in the mesh; None for all in one."""
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", attributes):
        return [_cycle(_lists(pairs[1]))]
    text = re.search(r"replica_groups=(\{\{.*?\}\}|\[[^ ]*\S*|mesh\[.*?\] \{.*?\})", attributes)
    if text is None:
        return None
    if text[1].startswith("{"):
        return _lists(text[1])
    if text[1].startswith("mesh"):
        return _named(text[1])
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text[1])
    assert iota, text[1]
    shape, over, order = iota.groups()
    ids = np.arange(math.prod(_ints(over))).reshape(_ints(over))
    ids = ids.transpose(_ints(order)) if order else ids
    return ids.reshape(_ints(shape))


def _named(text: str) -> np.ndarray:
    """Groups said as `mesh['data'=2,'fsdp'=4] {'fsdp'}`."""
    axes = re.findall(r"'([\w.]+)'=(\d+)", text)
    along = re.findall(r"'([\w.]+)'", text[text.rindex("{") :])
    shape = [int(size) for _, size in axes]
    ids = np.arange(math.prod(shape)).reshape(shape)
    names = [name for name, _ in axes]
    last = [names.index(name) for name in along]
    order = [i for i in range(len(names)) if i not in last] + last
    return ids.transpose(order).reshape(-1, math.prod(shape[i] for i in last))


def _cycle(pairs: list[list[int]]) -> list[int]:
    """The devices that a permutation moves something of the first one's to, one after the other."""
    to = {source: target for source, target in pairs}
    here, found = pairs[0][0], []
    while here in to and here not in found:
        found.append(here)
        here = to[here]
    return found if here in found else [*found, here]


def _lists(text: str) -> list[list[int]]:
    return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
