"""Plans: the step of a config compiled for absent devices, with its memory and collectives."""

import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.stages import Lowered

from jtrain.errors import ConfigError
from jtrain.inspect.plan.collectives import (
    Collective,
    CollectiveTraffic,
    read_collectives,
    sum_by_axes,
)
from jtrain.inspect.plan.compiler import CompilerOutput, compile_and_read
from jtrain.inspect.plan.topology import Topology
from jtrain.inspect.sharding_table import describe_sharding
from jtrain.parallel import PipelineSchedule
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import set_up


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and collectives of a step on each device."""

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
    schedule: PipelineSchedule | None = None
    """The pipeline schedule, if layers are in stages."""
    why: str = ""
    """The reason for an automatically chosen layout."""
    unread: tuple[str, ...] = ()
    """Descriptions of collectives that could not be read."""

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        m = self.memory
        return m["arguments"] + m["temporaries"] + m["output"] - m["aliased"]

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, in bytes and seconds."""
        return {
            "topology": self.topology,
            "devices": self.devices,
            "layout": dict(self.layout),
            "memory": {**self.memory, "peak": self.peak, "leaves": self.leaves},
            "collectives": sum_by_axes(self.collectives),
            "unread": list(self.unread),
            "why": self.why,
            "bubble": self.schedule.bubble if self.schedule else 0.0,
            "seconds": round(self.seconds, 1),
        }


def make_plan(config: RunConfig, topology: Topology, dump: Path | None = None) -> Plan:
    """Compile the step of `jtrain run` for these devices.

    Args:
        dump: an empty folder for the compiler's files: the program, and the buffers in memory at
            its peak.

    Raises:
        ConfigError: if the step needs more memory than a device has, or the config is invalid.
    """
    start = time.perf_counter()
    setup = set_up(config, among=topology.devices)
    try:
        output = _compile(setup.lower_step(), dump)
    except jax.errors.JaxRuntimeError as error:
        raise _too_large(topology, error) from error
    seconds = time.perf_counter() - start
    layout, state = setup.strategy.axes or {"data": 1}, describe_sharding(setup)
    traffic = _traffic(output, layout)
    return Plan(
        topology=topology.name,
        devices=math.prod(layout.values()),
        layout=layout,
        memory=_memory(output.program, topology.limit),
        leaves=state.device + state.host,
        collectives=traffic.collectives,
        seconds=seconds,
        schedule=setup.strategy.schedule,
        why=setup.why,
        unread=traffic.unread,
    )


def _compile(lowered: Lowered, dump: Path | None) -> CompilerOutput:
    if dump is not None:
        return compile_and_read(lowered, dump)
    with tempfile.TemporaryDirectory() as scratch:
        return compile_and_read(lowered, Path(scratch))


def _traffic(output: CompilerOutput, layout: Mapping[str, int]) -> CollectiveTraffic:
    if output.unread:
        return CollectiveTraffic((), (f"no collective: {output.unread}",))
    return read_collectives(output.text, layout)


def _memory(program: Any, limit: int) -> dict[str, int]:
    stats = program.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "host": stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
        "limit": limit,
    }


def _too_large(topology: Topology, error: Exception) -> Exception:
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    sizes = re.findall(r"[\d.]+[GM](?:iB)?\b", str(error))
    report = f" (the compiler reports {' of '.join(sizes[:2])})" if len(sizes) > 1 else ""
    return ConfigError(
        f"A step does not fit on a device of {topology.name}{report}. Split more of it: "
        f"parallel.kind=sharded with a larger parallel.fsdp, tensor or stage; recompute more "
        f"(model.remat=full), or process fewer rows at a time (a larger microbatches)."
    )


def format_plan(plan: Plan) -> str:
    """Return the plan as text: layout, memory of a device, bytes that it sends in a step."""
    layout = " x ".join(f"{axis} {size}" for axis, size in plan.layout.items())
    lines = [f"{plan.topology}: {plan.devices} devices, {layout}; compiled in {plan.seconds:.0f} s"]
    lines += [str(note) for note in (plan.why, plan.schedule) if note]
    memory, limit = plan.memory, plan.memory["limit"]
    lines += ["", "memory of a device"]
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
    share = f"of {format_bytes(limit)}: {_fits(plan.peak, limit)}" if limit else ""
    lines.append(f"  {'in all':12} {format_bytes(plan.peak):>10}   {share}".rstrip())
    lines += ["", "sent by each device in a step, loops counted"]
    for axes, kinds in sum_by_axes(plan.collectives).items():
        for kind, count in sorted(kinds.items(), key=lambda item: -item[1]):
            lines.append(f"  {axes:12} {format_bytes(count):>10}   {kind}")
    if not plan.collectives and not plan.unread:
        lines.append("  nothing")
    lines += [f"  not read: {note}" for note in plan.unread]
    return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Format bytes in decimal units, as in the specifications of chips: `5.05 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return (
                f"{count / factor:.2f} {unit}" if count < 1e11 else f"{count / factor:.0f} {unit}"
            )
    return f"{count} B"


def _fits(peak: int, limit: int) -> str:
    return f"{peak / limit:.0%}" + ("" if peak <= limit else ", it does not fit")
