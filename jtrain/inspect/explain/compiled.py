"""Fusions and collectives of a compiled step, by module."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jtrain.inspect.explain.operations import grouped_path, parse_scope
from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    CollectiveRow,
    collective_table,
    collectives_of,
    reason,
)
from jtrain.inspect.plan.compile import CompiledStep
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.op_costs import fusion_outputs
from jtrain.inspect.plan.schedule import mark_overlapped

# Instructions that compute nothing: they name, pass on or view other values.
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}


class Fusion(NamedTuple):
    """Fusions of one kind in one module: operations that run as one loop over memory."""

    module: str
    kind: str
    """As XLA names it: kLoop, kInput, kOutput, kCustom."""
    operations: str
    """The most frequent operations inside."""
    fusions: int = 0
    """Fusions in the program."""
    times: int = 0
    """Runs in a step."""
    written: int = 0
    """Bytes that they write in a step."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of a step."""

    platform: str
    memory: Mapping[str, int]
    """Bytes on a device: arguments, temporaries, output, aliased."""
    seconds: float
    """Seconds of lowering and compiling."""
    instructions: int = 0
    """Instructions that run, outside of fusions; a loop's body counts once."""
    fused: int = 0
    """Operations inside fusions."""
    fusions: tuple[Fusion, ...] = ()
    """The ones that write most first."""
    collectives: tuple[CollectiveRow, ...] = ()
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
    step: CompiledStep, mesh: Mapping[str, int], *, seconds: float, platform: str
) -> CompiledProgram:
    """Read a compiled step; a program in an unknown format gives a note in `unread`."""
    memory = {name: size for name, size in step.memory.items() if name != "host"}
    unread = (step.too_large.partition("\n")[0],) if step.too_large else ()
    found = CompiledProgram(platform, memory, seconds, unread=unread)
    try:
        program = HloProgram(step.text)
        found = _with_fusions(found, program)
        traffic = collectives_of(program, mesh)
        collectives = mark_overlapped(traffic.collectives, program, mesh)
    except NOT_UNDERSTOOD as error:
        return dataclasses.replace(found, unread=(*unread, reason(error)))
    rows, unread = collective_table(collectives, _module), (*unread, *traffic.unread)
    return dataclasses.replace(found, collectives=tuple(rows), unread=unread)


def operation_modules(text: str) -> dict[str, str]:
    """Return the module of each instruction of a compiled program that has one, by its name."""
    try:
        computations = HloProgram(text).computations.values()
    except NOT_UNDERSTOOD:
        return {}
    modules = {
        each.name: _module(each.quoted("op_name")) for c in computations for each in c.values()
    }
    return {name: module for name, module in modules.items() if module != "-"}


def _with_fusions(found: CompiledProgram, program: HloProgram) -> CompiledProgram:
    """Return the program with its fusions, and counts of instructions inside and outside."""
    inside = {
        name
        for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.operation == "fusion"
        for name in instruction.called.get("calls", ())
    }
    sums: dict[tuple[str, str, str], Fusion] = {}
    instructions = fused = 0
    for run in program.walk():
        if run.within in inside:
            continue
        each = run.instruction
        instructions += each.operation not in _NO_WORK
        if each.operation != "fusion":
            continue
        contents = collections.Counter(
            part.operation
            for name in each.called.get("calls", ())
            for part in program.computations[name].values()
            if part.operation not in _NO_WORK
        )
        fused += contents.total()
        outputs = fusion_outputs(program, each)
        kind = re.search(r"kind=(\w+)", each.attributes)
        most = ", ".join(operation for operation, _ in contents.most_common(3))
        key = (_module(each.quoted("op_name")), kind[1] if kind else "", most)
        one = sums.get(key, Fusion(*key))
        sums[key] = one._replace(
            fusions=one.fusions + 1,
            times=one.times + run.times,
            written=one.written + run.times * sum(out.num_bytes for out in outputs),
        )
    fusions = tuple(sorted(sums.values(), key=lambda fusion: -fusion.written))
    return dataclasses.replace(found, instructions=instructions, fused=fused, fusions=fusions)


def _module(name: str) -> str:
    """Return the module and the pass of an operation's name.

    A merged operation has the names of its parts: `jit(step)/(a/reduce_sum:b/dot_general)`.
    """
    # The last part of a name is the operation itself.
    head, _, parts = name.partition("/(")
    names = [f"{head}/{part}" for part in parts.removesuffix(")").split(":")]
    scopes = [parse_scope(each.rpartition("/")[0]) for each in (names if ":" in parts else [name])]
    paths = dict.fromkeys("/".join(grouped_path(scope.path)) for scope in scopes)
    modules = [path for path in paths if path] or ["-"]
    more = f" + {len(modules) - 1} more" if len(modules) > 1 else ""
    phase = next((scope.phase for scope in scopes if scope.phase not in (None, "forward")), "")
    return f"{modules[-1]}{more}{f' ({phase})' if phase else ''}"
