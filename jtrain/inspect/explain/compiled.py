"""Collectives of a compiled step, by module."""

import dataclasses
from collections.abc import Mapping
from typing import Any

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
from jtrain.inspect.plan.schedule import mark_overlapped


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of a step."""

    platform: str
    memory: Mapping[str, int]
    """Bytes on a device: arguments, temporaries, output, aliased."""
    seconds: float
    """Seconds of lowering and compiling."""
    collectives: tuple[CollectiveRow, ...] = ()
    unread: tuple[str, ...] = ()
    """Parts of the program that could not be read."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "platform": self.platform,
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
