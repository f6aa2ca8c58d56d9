"""Plans: the step of a config compiled for absent devices, with its memory, traffic and time."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from jtrain.config.durations import SECONDS, Duration
from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    Collective,
    collective_table,
    collectives_of,
    reason,
)
from jtrain.inspect.plan.compile import CompiledStep, load_or_compile_step
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.memory import StatePart, Tensor, name_tensors, state_parts
from jtrain.inspect.plan.op_costs import unknown_kernels
from jtrain.inspect.plan.roofline import Estimate, estimate_step
from jtrain.inspect.plan.schedule import mark_overlapped
from jtrain.inspect.plan.topology import Topology
from jtrain.io.formatting import (
    align_columns,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
)
from jtrain.parallel import PipelineSchedule
from jtrain.parallel.program_cache import mesh_devices
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program, set_up
from jtrain.train.summary import StepFlops, bound_step_flops

LISTED = 20  # tensors in a plan


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, collectives and estimated time of a step on each device."""

    topology: str
    devices: int
    layout: Mapping[str, int]
    """The axes of the mesh and their sizes."""
    memory: Mapping[str, int]
    """Bytes: arguments, temporaries, output, aliased, host, limit (0: unknown)."""
    collectives: tuple[Collective, ...]
    seconds: float
    """Seconds for tracing and compiling."""
    parts: tuple[StatePart, ...] = ()
    """The state's leaves by part: parameters, frozen weights, the optimizer's state, others."""
    schedule: PipelineSchedule | None = None
    """The pipeline schedule, if layers are in stages."""
    why: str = ""
    """The reason for an automatically chosen layout."""
    unread: tuple[str, ...] = ()
    """Descriptions of collectives that could not be read."""
    tensors: tuple[Tensor, ...] = ()
    """The largest arrays in memory at the peak."""
    flops: StepFlops = StepFlops(None, None)
    """Of the loss and its gradient, on all devices together."""
    flops_exact: bool = True
    """False: loops or kernels with an unknown number of operations make `flops` a lower bound."""
    estimate: Estimate | None = None
    """The roofline estimate; None if the program or the chip's figures are not known."""
    cached: bool = False
    """The compiler's answer came from the cache."""
    unused: int = 0
    """Devices of the topology that the layout leaves out."""
    steps: int = 0
    """Steps of the run; 0: not known, as its length is a time or its stages differ."""
    price: float | None = None
    """Dollars for an hour of a device, where they were given."""

    @property
    def leaves(self) -> int:
        """Bytes of the state's leaves on each device."""
        return sum(part.bytes for part in self.parts)

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        m = self.memory
        return m["arguments"] + m["temporaries"] + m["output"] - m["aliased"]

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit, or the limit is not known."""
        return not self.memory["limit"] or self.peak <= self.memory["limit"]

    @property
    def mfu(self) -> float | None:
        """Estimated share of the peak FLOPs that the model's take; None if not known."""
        if self.estimate is None or not self.flops.model:
            return None
        return self.flops.model / (self.devices * self.estimate.peak * self.estimate.seconds)

    @property
    def run_seconds(self) -> float | None:
        """Estimated time of all steps of the run; None if not known."""
        return self.steps * self.estimate.seconds if self.steps and self.estimate else None

    @property
    def dollars(self) -> float | None:
        """Estimated cost of the run's steps; None without a price."""
        if self.price is None or self.run_seconds is None:
            return None
        return (self.devices + self.unused) * self.price * self.run_seconds / 3600

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in bytes and seconds."""
        run = {"steps": self.steps, "seconds": self.run_seconds, "dollars": self.dollars}
        limit = self.memory["limit"]
        headroom = {"headroom": limit - self.peak} if limit else {}
        return {
            "topology": self.topology,
            "devices": self.devices,
            "unused": self.unused,
            "layout": dict(self.layout),
            "fits": self.fits,
            "memory": {**self.memory, "peak": self.peak, "leaves": self.leaves, **headroom},
            "state": [part._asdict() for part in self.parts],
            "tensors": [tensor._asdict() for tensor in self.tensors],
            "collective_table": [row._asdict() for row in collective_table(self.collectives)],
            "unread": list(self.unread),
            "why": self.why,
            "bubble": self.schedule.bubble if self.schedule else 0.0,
            "model_flops": self.flops.model,
            "hardware_flops": self.flops.hardware,
            "flops_exact": self.flops_exact,
            "estimate": self.estimate and {**self.estimate.plain(), "mfu": self.mfu},
            "run": run,
            "seconds": round(self.seconds, 1),
            "cached": self.cached,
        }


def make_plan(config: RunConfig, topology: Topology, *, price: float | None = None) -> Plan:
    """Compile the step of `jtrain run` for these devices, or read the answer from the cache.

    A step that needs more memory than a device has gives a plan whose `fits` is False.

    Raises:
        ConfigError: if the config is invalid.
    """
    start = time.perf_counter()
    program = set_up(single_step(config), among=topology.devices)
    step = load_or_compile_step(program, topology)
    flops, exact = bound_step_flops(program)
    layout = program.resolved.strategy.axes or {"data": 1}
    devices = math.prod(layout.values())
    timed = isinstance(config.steps, Duration) and config.steps.unit in SECONDS
    return Plan(
        topology=topology.name,
        devices=devices,
        unused=len(topology.devices) - devices,
        layout=layout,
        memory={**step.memory, "limit": topology.limit},
        parts=state_parts(program),
        schedule=program.resolved.strategy.schedule,
        why=program.resolved.why,
        **_read(program, topology, step, layout),
        flops=flops,
        flops_exact=exact,
        seconds=time.perf_counter() - start,
        cached=step.cached,
        steps=0 if timed or config.stages else program.resolved.config.steps,
        price=price,
    )


def single_step(config: RunConfig) -> RunConfig:
    """Return the config with a step a call where calls of a small step would take several.

    A loop that takes a number of steps as an argument has no length that a plan could count.
    """
    return (
        dataclasses.replace(config, steps_per_call=1) if config.steps_per_call == "auto" else config
    )


def _read(
    program: Program, topology: Topology, step: CompiledStep, layout: Mapping[str, int]
) -> dict[str, Any]:
    """Return what the text of a step says; `unread` has what could not be read."""
    try:
        hlo = HloProgram(step.text)
        traffic = collectives_of(hlo, layout)
        collectives = mark_overlapped(traffic.collectives, hlo, layout)
    except NOT_UNDERSTOOD as error:
        return {"collectives": (), "unread": (f"no collective: {reason(error)}",)}
    found: dict[str, Any] = {"collectives": collectives, "unread": traffic.unread}
    devices = mesh_devices(program.resolved.abstract_state) or topology.devices[:1]
    try:
        found["tensors"] = name_tensors(hlo, step.text, step.buffers)[:LISTED]
        found["estimate"] = estimate_step(hlo, layout, devices)
    except NOT_UNDERSTOOD as error:
        found["unread"] += (f"no estimate: {reason(error)}",)
    if names := unknown_kernels(hlo):
        found["unread"] += (f"no FLOPs of {', '.join(names)}: the estimate is a lower bound",)
    return found


SHOWN = 10  # tensors in the text


def format_plan(plan: Plan) -> str:
    """Return the plan as text: layout, memory of a device, traffic, work and estimated time."""
    layout = " x ".join(f"{axis} {size}" for axis, size in plan.layout.items())
    how = "from the cache" if plan.cached else "compiled"
    count = f"{plan.devices} of {plan.devices + plan.unused}" if plan.unused else plan.devices
    head = f"{plan.topology}: {count} devices, {layout}; {how} in {plan.seconds:.0f} s"
    notes = [str(note) for note in (plan.why, plan.schedule) if note]
    if plan.unused:
        words = f"warning: the layout leaves {plan.unused} devices unused"
        notes.insert(0, f"{words}; parallel.kind=fsdp parallel.devices=0 uses all")
    parts = [
        [head, *notes],
        _format_memory(plan),
        _format_tensors(plan),
        _format_collectives(plan),
        _format_work(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _format_memory(plan: Plan) -> list[str]:
    memory, limit = plan.memory, plan.memory["limit"]
    lines = ["memory of a device"]
    rows = {
        "arguments": "the state and a batch; the state's leaves alone are "
        f"{format_bytes(plan.leaves)}",
        "temporaries": "at most at once",
        "output": f"of which {format_bytes(memory['aliased'])} in the buffers of arguments",
        "host": "on the machine, beside the device",
    }
    for key, note in rows.items():
        if memory[key] or key != "host":
            lines.append(f"  {key:12} {format_bytes(memory[key]):>10}   {note}")
        if key == "arguments":
            lines += [
                f"    {part.name:10} {format_bytes(part.bytes):>10}   {part.note}".rstrip()
                for part in plan.parts
                if part.bytes >= plan.leaves / 1000  # not the number of a step
            ]
    share = ""
    if limit:
        left = f"{format_bytes(limit - plan.peak)} free" if plan.fits else "it does not fit"
        share = f"of {format_bytes(limit)}: {plan.peak / limit:.0%}, {left}"
    lines.append(f"  {'in all':12} {format_bytes(plan.peak):>10}   {share}".rstrip())
    return lines


def _format_tensors(plan: Plan) -> list[str]:
    if not plan.tensors:
        return []
    rows = [
        (
            f"  {format_bytes(each.bytes)}",
            each.role,
            f"{each.arrays} x {each.shape}" if each.arrays > 1 else each.shape,
            " ".join(filter(None, [each.name, each.source and f"({each.source})"])),
        )
        for each in plan.tensors[:SHOWN]
    ]
    return ["largest arrays at the peak", *align_columns(rows, right=(0,))]


def _format_collectives(plan: Plan) -> list[str]:
    lines = ["sent by each device in a step, loops counted"]
    for row in collective_table(plan.collectives):
        axes = " x ".join(row.axes) or "other"
        beside = f", {row.overlapped / row.sent:.0%} beside computation" if row.sent else ""
        lines.append(f"  {axes:12} {format_bytes(row.sent):>10}   {row.kind}, {row.times}{beside}")
    if not plan.collectives and not plan.unread:
        lines.append("  nothing")
    return lines + [f"  not read: {note}" for note in plan.unread]


def _format_work(plan: Plan) -> list[str]:
    flops, lines = plan.flops, []
    least = "" if plan.flops_exact else "at least "
    if flops.model:
        again = (
            f", {least}{format_count(flops.hardware)} with recomputation" if flops.hardware else ""
        )
        lines.append(f"FLOPs of a step: {least}{format_count(flops.model)} of the model{again}")
    if not plan.flops_exact:
        lines.append(
            "  warning: the loss has loops whose number of turns depends on data, or kernels that "
            "are not known; a loop counts as one turn and a kernel as nothing"
        )
    found = plan.estimate
    if found is None:
        return [*lines, f"no estimate of the time: figures of {plan.topology} are not known"]
    share, line = f", MFU {plan.mfu:.0%}" if plan.mfu else "", found.timeline
    return [
        *lines,
        f"estimate, not a measurement: {format_seconds(found.seconds)} a step{share}; "
        f"{found.bound} takes longest",
        f"  compute {format_seconds(line.compute)}, memory {format_seconds(line.memory)}, "
        f"interconnect {format_seconds(line.links)}, of which the device waits for "
        f"{format_seconds(line.exposed)}",
        *_format_run(plan),
        "  " + " ".join(filter(None, [f"from {found.chip}", found.source and f"({found.source})"])),
    ]


def _format_run(plan: Plan) -> list[str]:
    if plan.run_seconds is None:
        return []
    long = format_duration if plan.run_seconds >= 60 else format_seconds
    line = f"  {plan.steps:,} steps of the run: {long(plan.run_seconds)}"
    if plan.dollars is None:
        return [line]
    cost = f"{plan.dollars:,.0f}" if plan.dollars >= 100 else f"{plan.dollars:.2g}"
    return [f"{line}, ${cost} at ${plan.price:g} per device-hour, without evaluation"]
