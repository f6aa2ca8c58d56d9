"""Fusions and collectives of a compiled step, by module."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jtrain.inspect.explain.scopes import grouped_path, parse_operation_name
from jtrain.inspect.plan.collectives import NOT_UNDERSTOOD, read_collectives
from jtrain.inspect.plan.hlo import ExecutedInstruction, HloProgram, array_sizes

# Instructions that compute nothing: they name, pass on or view other values.
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}


class Fusion(NamedTuple):
    """Fusions of one kind in one module: operations that run as one loop over memory."""

    module: str
    kind: str
    """As XLA names it: kLoop, kInput, kOutput, kCustom."""
    operations: str
    """The most frequent operations inside."""
    fusions: int
    """Fusions in the program."""
    times: int
    """Runs in a step."""
    written: int
    """Bytes that they write in a step."""


class CollectiveSum(NamedTuple):
    """Collectives of one kind over the same axes in one module."""

    module: str
    kind: str
    axes: str
    times: int
    sent: int
    """Bytes that each device sends in a step."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of a step."""

    instructions: int
    """Instructions that run, outside of fusions; a loop's body counts once."""
    fused: int
    """Operations inside fusions."""
    fusions: tuple[Fusion, ...]
    """The ones that write most first."""
    collectives: tuple[CollectiveSum, ...]
    memory: Mapping[str, int]
    """Bytes on a device: arguments, temporaries, output, aliased."""
    seconds: float
    """Seconds of lowering and compiling."""
    platform: str
    unread: tuple[str, ...] = ()
    """Parts of the program that could not be read."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "platform": self.platform,
            "instructions": self.instructions,
            "fused_operations": self.fused,
            "fusions": [fusion._asdict() for fusion in self.fusions],
            "collectives": [each._asdict() for each in self.collectives],
            "memory": dict(self.memory),
            "seconds": round(self.seconds, 1),
            "unread": list(self.unread),
        }


def read_compiled(
    text: str,
    mesh: Mapping[str, int],
    memory: Mapping[str, int],
    *,
    seconds: float,
    platform: str,
    unread: str = "",
) -> CompiledProgram:
    """Read the text of a compiled step; a text in an unknown format gives a note in `unread`."""
    notes, fusions, instructions, fused = [unread] if unread else [], (), 0, 0
    try:
        fusions, instructions, fused = _read_fusions(HloProgram(text))
    except NOT_UNDERSTOOD as error:
        notes.append(f"no fusion: {error}")
    traffic = read_collectives(text, mesh) if text else None
    sums: dict[tuple[str, str, str], list[int]] = {}
    for each in traffic.collectives if traffic else ():
        key = (_module(each.where), each.kind, " x ".join(each.axes) or "other")
        found = sums.setdefault(key, [0, 0])
        found[0] += each.times
        found[1] += each.sent
    collectives = [CollectiveSum(*key, *found) for key, found in sums.items()]
    return CompiledProgram(
        instructions=instructions,
        fused=fused,
        fusions=fusions,
        collectives=tuple(sorted(collectives, key=lambda each: -each.sent)),
        memory=memory,
        seconds=seconds,
        platform=platform,
        unread=(*notes, *(traffic.unread if traffic else ())),
    )


def operation_modules(text: str) -> dict[str, str]:
    """Return the module of each instruction of a compiled program that has one, by its name."""
    if not text:
        return {}
    try:
        computations = HloProgram(text).computations.values()
    except NOT_UNDERSTOOD:
        return {}
    found = {}
    for computation in computations:
        for instruction in computation.values():
            name = re.search(r'op_name="([^"]*)"', instruction.attributes)
            if name and (module := _module(name[1])) != "-":
                found[instruction.name] = module
    return found


def _read_fusions(program: HloProgram) -> tuple[tuple[Fusion, ...], int, int]:
    """Return the fusions, the instructions outside of them, and the operations inside."""
    inside = {
        name
        for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.operation == "fusion"
        for name in instruction.called.get("calls", ())
    }
    groups: dict[tuple[str, str, str], list[int]] = {}
    instructions = fused = 0
    for run in program.walk():
        if run.within in inside:
            continue
        instruction = run.instruction
        instructions += instruction.operation not in _NO_WORK
        if instruction.operation != "fusion":
            continue
        contents = _contents(program, run)
        fused += sum(contents.values())
        kind = re.search(r"kind=(\w+)", instruction.attributes)
        name = re.search(r'op_name="([^"]*)"', instruction.attributes)
        most = ", ".join(operation for operation, _ in contents.most_common(3))
        key = (_module(name[1] if name else ""), kind[1] if kind else "", most)
        found = groups.setdefault(key, [0, 0, 0])
        found[0] += 1
        found[1] += run.times
        found[2] += run.times * _written_bytes(program, run)
    fusions = [Fusion(*key, *found) for key, found in groups.items()]
    return tuple(sorted(fusions, key=lambda f: -f.written)), instructions, fused


def _contents(program: HloProgram, run: ExecutedInstruction) -> collections.Counter[str]:
    """Count the operations inside a fusion."""
    found: collections.Counter[str] = collections.Counter()
    for name in run.instruction.called.get("calls", ()):
        instructions = program.computations[name].values()
        found.update(i.operation for i in instructions if i.operation not in _NO_WORK)
    return found


def _written_bytes(program: HloProgram, run: ExecutedInstruction) -> int:
    """Return the bytes that a fusion writes in a run: of an update in place only the update."""
    for name in run.instruction.called.get("calls", ()):
        computation, root = program.computations[name], program.roots.get(name)
        while root is not None and root.operation in {"bitcast", "copy"}:
            root = computation.get(root.operands[0])
        if root is not None and root.operation == "dynamic-update-slice":
            return sum(array_sizes(computation[root.operands[1]].shape))
    return sum(array_sizes(run.instruction.shape))


def _module(name: str) -> str:
    """Return the module and the pass of an operation's name.

    A merged operation has the names of its parts: `jit(step)/(a/reduce_sum:b/dot_general)`.
    """
    head, merged, parts = name.partition("/(")
    names = [f"{head}/{part}" for part in parts.removesuffix(")").split(":")] if merged else [name]
    scopes = [parse_operation_name(each) for each in names if ":" in parts or each == name]
    scopes = scopes or [parse_operation_name(name)]
    paths = dict.fromkeys("/".join(grouped_path(scope.path)) for scope in scopes)
    modules = [path for path in paths if path] or ["-"]
    more = f" + {len(modules) - 1} more" if len(modules) > 1 else ""
    phase = next((scope.phase for scope in scopes if scope.phase not in (None, "forward")), "")
    return f"{modules[-1]}{more}{f' ({phase})' if phase else ''}"
