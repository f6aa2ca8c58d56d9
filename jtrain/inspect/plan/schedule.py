"""Simulation of a compiled program's schedule at given speeds: which collectives compute hides."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jtrain.inspect.plan.hlo import HloProgram, Instruction
from jtrain.inspect.plan.op_costs import OpCost, op_cost
from jtrain.inspect.plan.overlap import CollectiveFinder, PlacedCollective


class Speeds(NamedTuple):
    """Speeds of a device, in operations and bytes a second."""

    flops: float
    memory: float
    host: float
    link: Callable[[PlacedCollective], float]
    """Bytes a second that a device sends in a collective."""
    fp8: float = 0.0
    """Operations a second in products of fp8; 0: as in `flops`."""

    def compute(self, cost: OpCost) -> float:
        """Return the seconds of an instruction's products."""
        return (cost.flops - cost.fp8) / self.flops + cost.fp8 / (self.fp8 or self.flops)


@dataclasses.dataclass
class Timeline:
    """Seconds of a program, or of a computation, on each device."""

    total: float = 0.0
    busy: float = 0.0  # of instructions that are no collectives
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
            if each.operation in {"copy-done", "async-done"} and each.operands[0] in pending:
                wait(each.operands[0])
        for key in list(pending):
            wait(key)
        return line

    def _work(
        self, name: str, each: Instruction, line: Timeline, start: Callable[..., None]
    ) -> None:
        """Add the time of an instruction that is no collective."""
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
            line.flops += cost.flops
            line.compute += self._speeds.compute(cost)
            line.memory += cost.memory / self._speeds.memory
            if each.operation.endswith("-start"):
                start(each.name, "host" if cost.host else "memory", self._copy(cost))
                return
            seconds = max(self._speeds.compute(cost), self._copy(cost))
            line.busy += seconds
            line.total += seconds

    def _copy(self, cost: OpCost) -> float:
        return max(cost.memory / self._speeds.memory, cost.host / self._speeds.host)
