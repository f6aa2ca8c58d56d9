"""Plans: the step of a config compiled for absent devices, with its memory, traffic and time."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    Collective,
    collectives_of,
    reason,
    sum_by_axes,
)
from jtrain.inspect.plan.compiled_step import CompiledStep, load_or_compile_step
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.kernel_costs import unknown_kernels
from jtrain.inspect.plan.named_tensors import Tensor, name_tensors
from jtrain.inspect.plan.overlap import mark_overlapped
from jtrain.inspect.plan.roofline import Estimate, estimate_step
from jtrain.inspect.plan.state_parts import StatePart, state_parts
from jtrain.inspect.plan.topology import Topology
from jtrain.inspect.sharding_table import describe_sharding
from jtrain.parallel import PipelineSchedule
from jtrain.parallel.program_cache import mesh_devices
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup, set_up
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
    leaves: int
    """Bytes of the state's leaves on each device."""
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
        return self.estimate.mfu(self.flops.model, self.devices)

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in bytes and seconds."""
        limit = self.memory["limit"]
        headroom = {"headroom": limit - self.peak} if limit else {}
        estimate = {"estimate": self.estimate and {**self.estimate.plain(), "mfu": self.mfu}}
        return {
            "topology": self.topology,
            "devices": self.devices,
            "unused": self.unused,
            "layout": dict(self.layout),
            "fits": self.fits,
            "memory": {**self.memory, "peak": self.peak, "leaves": self.leaves, **headroom},
            "state": [part._asdict() for part in self.parts],
            "tensors": [tensor.plain() for tensor in self.tensors],
            "collectives": sum_by_axes(self.collectives),
            "collective_table": [row.plain() for row in collective_table(self.collectives)],
            "unread": list(self.unread),
            "why": self.why,
            "bubble": self.schedule.bubble if self.schedule else 0.0,
            "model_flops": self.flops.model,
            "hardware_flops": self.flops.hardware,
            "flops_exact": self.flops_exact,
            **estimate,
            "seconds": round(self.seconds, 1),
            "cached": self.cached,
        }


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over the same axes."""

    axes: tuple[str, ...]
    kind: str
    times: int
    """Executions in a step."""
    sent: int
    """Bytes that each device sends."""
    overlapped: int
    """Bytes of `sent` in collectives that run beside computation."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {**dataclasses.asdict(self), "axes": list(self.axes)}


def collective_table(found: Sequence[Collective]) -> list[CollectiveRow]:
    """Return a row for each kind of collective and its axes, most bytes first."""
    groups: dict[tuple, list[Collective]] = {}
    for each in found:
        groups.setdefault((each.axes, each.kind), []).append(each)
    rows = [
        CollectiveRow(
            axes,
            kind,
            sum(each.times for each in group),
            sum(each.sent for each in group),
            sum(each.sent for each in group if each.overlapped),
        )
        for (axes, kind), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.sent)


def make_plan(config: RunConfig, topology: Topology, dump: Path | None = None) -> Plan:
    """Compile the step of `jtrain run` for these devices, or read the answer from the cache.

    A step that needs more memory than a device has gives a plan whose `fits` is False.

    Args:
        dump: an empty folder for the compiler's files: the program, and the buffers in memory at
            its peak.

    Raises:
        ConfigError: if the config is invalid.
    """
    start = time.perf_counter()
    setup = set_up(single_step(config), among=topology.devices)
    step = load_or_compile_step(setup.lower_step(), topology, dump)
    bound = bound_step_flops(setup)
    plan = _read(setup, topology, step)
    return dataclasses.replace(
        plan,
        flops=bound.flops,
        flops_exact=bound.exact,
        seconds=time.perf_counter() - start,
        cached=step.cached,
    )


def single_step(config: RunConfig) -> RunConfig:
    """Return the config with a step a call where calls of a small step would take several.

    A loop that takes a number of steps as an argument has no length that a plan could count.
    """
    return (
        dataclasses.replace(config, steps_per_call=1) if config.steps_per_call == "auto" else config
    )


def _read(setup: TrainSetup, topology: Topology, step: CompiledStep) -> Plan:
    """Return the plan of a compiled step; parts that cannot be read are in `unread`."""
    layout, state = setup.strategy.axes or {"data": 1}, describe_sharding(setup)
    devices = math.prod(layout.values())
    plan = Plan(
        topology=topology.name,
        devices=devices,
        unused=len(topology.devices) - devices,
        layout=layout,
        memory={**step.memory, "limit": topology.limit},
        leaves=state.device + state.host,
        parts=state_parts(setup),
        collectives=(),
        seconds=step.seconds,
        schedule=setup.strategy.schedule,
        why=setup.why,
    )
    if step.unread:
        return dataclasses.replace(plan, unread=(f"no collective: {step.unread}",))
    try:
        program = HloProgram(step.text)
        traffic = collectives_of(program, layout)
        collectives = mark_overlapped(traffic.collectives, program, layout)
    except NOT_UNDERSTOOD as error:
        return dataclasses.replace(plan, unread=(f"no collective: {reason(error)}",))
    unread, tensors, estimate = traffic.unread, (), None
    try:
        tensors = name_tensors(program, step.text, step.buffers)[:LISTED]
        estimate = estimate_step(program, layout, mesh_devices(setup.like) or topology.devices[:1])
    except NOT_UNDERSTOOD as error:
        unread = (*unread, f"no estimate: {reason(error)}")
    if names := unknown_kernels(program):
        unread = (*unread, f"no FLOPs of {', '.join(names)}: the estimate is a lower bound")
    return dataclasses.replace(
        plan, collectives=collectives, unread=unread, tensors=tensors, estimate=estimate
    )
