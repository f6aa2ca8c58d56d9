"""A compiled program's schedule: the collectives that computation hides, and its time."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    Collective,
    as_collective,
    collective_key,
    read_collective,
)
from jtrain.inspect.plan.hlo import ExecutedInstruction, HloProgram, Instruction
from jtrain.inspect.plan.op_costs import OpCost, op_cost, op_flops

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # custom calls of the TPU compiler
HOLDERS = {"fusion", "async-start"}
NESTED = {"while", "conditional", "call"}


class CollectiveFinder:
    """Finder of the collectives that each instruction of a program begins and ends.

    A collective is one instruction (`all-reduce`), a pair (`all-gather-start`, `-done`), a fusion
    or an asynchronous computation that holds one, or a chain of pieces inside fusions between
    the TPU compiler's `AsyncCollectiveStart` and `AsyncCollectiveDone`.
    """

    def __init__(self, program: HloProgram, mesh: Mapping[str, int]):
        self._program = program
        self._mesh = mesh
        self._begun: dict[tuple[str, str], list[Collective]] = {}
        self._holds = {
            name: [found for each in computation.values() if (found := as_collective(each))]
            for name, computation in program.computations.items()
        }

    def started(self, within: str, instruction: Instruction) -> list[Collective]:
        """Return the collectives that begin at an instruction, as of one execution."""
        at = within, instruction.name
        if at not in self._begun:
            self._begun[at] = [
                found
                for scope, each in self._inside(within, instruction)
                if (found := self._find(scope, each)) is not None
            ]
        return self._begun[at]

    def ended(self, within: str, instruction: Instruction) -> list[str]:
        """Return the keys of the collectives that the device waits for at an instruction."""
        if instruction.operation.endswith("-done"):
            return [each.key for each in self._begun.get((within, instruction.operands[0]), [])]
        if instruction.operation == "fusion":
            name = instruction.called["calls"][0]
            if self._calls(name, DONE):
                return [collective_key(name, each) for each in self._holds[name]]
        if instruction.operation.endswith("-start") or instruction.operation == "send":
            return []
        begun = self._begun.get((within, instruction.name), [])
        # A key of digits is that of a chain, which another fusion ends.
        return [each.key for each in begun if not each.key.isdigit()]

    def is_collective(self, instruction: Instruction) -> bool:
        """Return whether an instruction does nothing but communicate."""
        if instruction.operation in {"send", "recv", "send-done", "recv-done"}:
            return True
        if instruction.operation == "async-start":
            return any(self._holds[name] for names in instruction.called.values() for name in names)
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
                nested = each.operation in NESTED
                if running and (nested or op_flops(self._program, name, each) > 0):
                    found |= running
                running |= {collective.key for collective in self.started(name, each)}
                running -= set(self.ended(name, each))
        return found

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

    def _find(self, within: str, instruction: Instruction) -> Collective | None:
        run = ExecutedInstruction(instruction, 1, within, True)
        try:
            return read_collective(run, self._program, self._mesh)
        except NOT_UNDERSTOOD:  # named in the plan as not read
            return None

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


class Speeds(NamedTuple):
    """Speeds of a device, in operations and bytes a second."""

    flops: float
    memory: float
    host: float
    link: Callable[[Collective], float]
    """Bytes a second that a device sends in a collective."""
    fp8: float = 0.0
    """Operations a second in products of fp8; 0: as in `flops`."""

    def compute(self, cost: OpCost) -> float:
        """Return the seconds of an instruction's products."""
        return (cost.flops - cost.fp8) / self.flops + cost.fp8 / (self.fp8 or self.flops)

    def copy(self, cost: OpCost) -> float:
        """Return the seconds of an instruction's bytes."""
        return max(cost.memory / self.memory, cost.host / self.host)


@dataclasses.dataclass
class Timeline:
    """Seconds of a program, or of a computation, on each device."""

    total: float = 0.0
    busy: float = 0.0  # of instructions that are not collectives
    compute: float = 0.0  # of products alone, at the peak
    memory: float = 0.0  # of all bytes to and from memory
    flops: float = 0.0  # not seconds: operations of products
    link_seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of each link

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for collectives or copies."""
        return self.total - self.busy

    @property
    def links(self) -> float:
        """Seconds of the collectives on the busiest link, one after the other."""
        return max(self.link_seconds.values(), default=0.0)

    def add(self, other: "Timeline", times: int = 1) -> None:
        """Add another timeline's seconds, `times` over."""
        for name in ("total", "busy", "compute", "memory", "flops"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for link, seconds in other.link_seconds.items():
            self.send(link, times * seconds)

    def send(self, link: str, seconds: float) -> None:
        """Add the seconds of a collective to its link."""
        self.link_seconds[link] = self.link_seconds.get(link, 0.0) + seconds


class Simulation:
    """Simulation of a program, one instruction after the other, in the order of its schedule.

    An instruction takes its products at the peak or its bytes at the memory's speed, the longer of
    both. An asynchronous collective or copy begins when its link is free, runs beside the following
    instructions, and the device waits for the rest of it where the program does.
    """

    def __init__(self, program: HloProgram, mesh: Mapping[str, int], speeds: Speeds):
        self._program = program
        self._finder = CollectiveFinder(program, mesh)
        self._speeds = speeds
        self._done: dict[str, Timeline] = {}

    def run(self, name: str = "") -> Timeline:
        """Return the timeline of a computation, by default of the whole program."""
        name = name or self._program.entry
        if name not in self._done:
            self._done[name] = self._run(name)
        return self._done[name]

    def _run(self, name: str) -> Timeline:
        line, free, pending = Timeline(), {}, {}

        def start(key: str, link: str, seconds: float) -> None:
            begin = max(line.total, free.get(link, 0.0))
            free[link] = pending[key] = begin + seconds

        def wait(key: str) -> None:
            line.total = max(line.total, pending.pop(key, 0.0))

        for each in self._program.computations[name].values():
            for collective in self._finder.started(name, each):
                seconds = collective.sent / self._speeds.link(collective)
                line.send(collective.link, seconds)
                start(collective.key, collective.link, seconds)
            self._work(name, each, line, start)
            for key in self._finder.ended(name, each):
                wait(key)
            if each.operation in {"copy-done", "async-done"}:
                wait(each.operands[0])
        for key in list(pending):
            wait(key)
        return line

    def _work(
        self, name: str, each: Instruction, line: Timeline, start: Callable[..., None]
    ) -> None:
        """Add the time of an instruction that is not a collective."""
        if each.operation == "while":
            trips = self._program.trips(each, name)
            line.add(self.run(each.called["body"][0]), 1 if trips is None else trips)
        elif each.operation == "conditional":
            names = [name for names in each.called.values() for name in names]
            line.add(max((self.run(name) for name in names), key=lambda x: x.total))
        elif each.operation == "call":
            line.add(self.run(each.called["to_apply"][0]))
        elif not self._finder.is_collective(each):
            cost = op_cost(self._program, name, each)
            compute, copy = self._speeds.compute(cost), self._speeds.copy(cost)
            line.flops += cost.flops
            line.compute += compute
            line.memory += cost.memory / self._speeds.memory
            if each.operation.endswith("-start"):
                start(each.name, "host" if cost.host else "memory", copy)
                return
            line.busy += max(compute, copy)
            line.total += max(compute, copy)
