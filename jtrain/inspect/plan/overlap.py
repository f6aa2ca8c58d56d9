"""Collectives in the order of a program's schedule, and which of them computation overlaps."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    Collective,
    as_collective,
    collective_key,
    find_collective,
)
from jtrain.inspect.plan.hlo import ExecutedInstruction, HloProgram, Instruction
from jtrain.inspect.plan.op_costs import op_flops

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # custom calls of the TPU compiler
HOLDERS = {"fusion", "async-start"}
NESTED = {"while", "conditional", "call"}


class PlacedCollective(NamedTuple):
    """One execution of a collective."""

    key: str
    kind: str
    axes: tuple[str, ...]
    sent: int  # bytes that each device sends
    link: str  # name of the links that it uses, of which it is the only user


class CollectiveFinder:
    """Finder of the collectives that each instruction of a program begins and ends.

    A collective is one instruction (`all-reduce`), a pair (`all-gather-start`, `-done`), a fusion
    or an asynchronous computation that holds one, or a chain of pieces inside fusions between
    the TPU compiler's `AsyncCollectiveStart` and `AsyncCollectiveDone`.
    """

    def __init__(self, program: HloProgram, mesh: Mapping[str, int]):
        self._program = program
        self._mesh = mesh
        self._begun: dict[tuple[str, str], list[PlacedCollective]] = {}
        self._holds = {
            name: [
                found for each in computation.values() if (found := as_collective(each)) is not None
            ]
            for name, computation in program.computations.items()
        }

    def started(self, within: str, instruction: Instruction) -> list[PlacedCollective]:
        """Return the collectives that begin at an instruction."""
        at = within, instruction.name
        if at not in self._begun:
            self._begun[at] = [
                placed
                for scope, each in self._inside(within, instruction)
                if (placed := self._place(scope, each)) is not None
            ]
        return self._begun[at]

    def ended(self, within: str, instruction: Instruction) -> list[str]:
        """Return the keys of the collectives that the device waits for at an instruction."""
        if instruction.operation.endswith("-done"):
            begun = self._begun.get((within, instruction.operands[0]), [])
            return [placed.key for placed in begun]
        if instruction.operation == "fusion":
            name = instruction.called["calls"][0]
            if self._calls(name, DONE):
                return [collective_key(name, each) for each in self._holds[name]]
        if instruction.operation.endswith("-start") or instruction.operation == "send":
            return []
        return [
            placed.key
            for placed in self._begun.get((within, instruction.name), [])
            if not placed.key.isdigit()  # a chain, which another fusion ends
        ]

    def is_collective(self, instruction: Instruction) -> bool:
        """Return whether an instruction does nothing but communicate."""
        if instruction.operation in {"send", "recv", "send-done", "recv-done"}:
            return True
        if instruction.operation == "async-start":
            names = [name for names in instruction.called.values() for name in names]
            return any(self._holds[name] for name in names)
        return as_collective(instruction) is not None

    def overlapped(self) -> set[str]:
        """Return the keys of collectives with a product, a kernel or a loop before their end.

        Those are pairs with it between start and done in the schedule, and chains with it in one
        of the fusions that hold their pieces.
        """
        found: set[str] = set()
        for name, computation in self._program.computations.items():
            running: set[str] = set()
            for each in computation.values():
                if running and self._computes(name, each):
                    found |= running
                running |= {placed.key for placed in self.started(name, each)}
                running -= set(self.ended(name, each))
        return found

    def _computes(self, within: str, instruction: Instruction) -> bool:
        if instruction.operation in NESTED:
            return True
        return op_flops(self._program, within, instruction) > 0

    def _inside(self, within: str, each: Instruction) -> Iterator[tuple[str, Instruction]]:
        found = as_collective(each)
        if found is not None:
            yield within, found
        elif each.operation in HOLDERS:
            for name in (name for names in each.called.values() for name in names):
                pieces = self._holds[name]
                chained = any("chain_id=" in piece.attributes for piece in pieces)
                if not chained or self._calls(name, START):
                    yield from ((name, piece) for piece in pieces)

    def _place(self, within: str, instruction: Instruction) -> PlacedCollective | None:
        run = ExecutedInstruction(instruction, 1, within, True)
        try:
            found = find_collective(run, self._program, self._mesh)
        except NOT_UNDERSTOOD:  # named in the plan as not read
            return None
        if found is None:
            return None
        link = " x ".join(found.axes)
        if found.kind == "collective-permute":
            link += _direction(instruction)
        return PlacedCollective(found.key, found.kind, found.axes, found.sent, link)

    def _calls(self, name: str, target: str) -> bool:
        return any(
            each.operation == "custom-call" and f'"{target}"' in each.attributes
            for each in self._program.computations[name].values()
        )


def mark_overlapped(
    found: tuple[Collective, ...], program: HloProgram, mesh: Mapping[str, int]
) -> tuple[Collective, ...]:
    """Return the collectives with `overlapped` set."""
    keys = CollectiveFinder(program, mesh).overlapped()
    return tuple(each._replace(overlapped=each.key in keys) for each in found)


def _direction(permutation: Instruction) -> str:
    """Return the direction of a ring of permutations: each has links of its own."""
    pair = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", permutation.attributes)
    return " +" if pair and (int(pair[2]) - int(pair[1])) == 1 else " -"
