"""The step of a config, compiled for devices that are not here, and what it takes there."""

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
from jtrain.inspect.plan.collectives import Collective, CollectiveTraffic, by_axes, collectives
from jtrain.inspect.plan.compiler import CompilerOutput, compile_and_read
from jtrain.inspect.plan.topology import Topology
from jtrain.inspect.sharding_table import laid
from jtrain.parallel import PipelineSchedule
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import set_up


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step takes on each device."""

    topology: str
    devices: int
    layout: Mapping[str, int]
    """The axes of the mesh and their sizes."""
    memory: Mapping[str, int]
    """Bytes: arguments, temporaries, output, aliased, host, limit (0: not known)."""
    leaves: int
    """Bytes of the leaves of the state by themselves, split as the layout says."""
    collectives: tuple[Collective, ...]
    seconds: float
    """That tracing and compiling took here."""
    schedule: PipelineSchedule | None = None
    """Of the pipeline, if layers are in stages."""
    why: str = ""
    """The layout was chosen, if it was."""
    unread: tuple[str, ...] = ()
    """What the compiled program did not tell about its collectives, in words."""

    @property
    def peak(self) -> int:
        """Bytes that the step needs at once."""
        m = self.memory
        return m["arguments"] + m["temporaries"] + m["output"] - m["aliased"]

    def plain(self) -> dict[str, Any]:
        """The same as numbers and names alone, in bytes and seconds."""
        return {
            "topology": self.topology,
            "devices": self.devices,
            "layout": dict(self.layout),
            "memory": {**self.memory, "peak": self.peak, "leaves": self.leaves},
            "collectives": by_axes(self.collectives),
            "unread": list(self.unread),
            "why": self.why,
            "bubble": self.schedule.bubble if self.schedule else 0.0,
            "seconds": round(self.seconds, 1),
        }


def plan(config: RunConfig, where: Topology, dump: Path | None = None) -> Plan:
    """Compile the very step of `jtrain run` for these devices.

    Args:
        dump: an empty folder that keeps the files which the compiler writes: the program, and the
            buffers that lie in memory at its peak.

    Raises:
        ConfigError: if it needs more memory than a device has, or for what the config asks.
    """
    begun = time.perf_counter()
    parts = set_up(config, among=where.devices)
    try:
        output = _compiled(parts.lower_step(), dump)
    except jax.errors.JaxRuntimeError as error:
        raise _too_large(where, error) from error
    took = time.perf_counter() - begun
    layout, state = parts.strategy.axes or {"data": 1}, laid(parts)
    traffic = _traffic(output, layout)
    return Plan(
        topology=where.name,
        devices=math.prod(layout.values()),
        layout=layout,
        memory=_memory(output.program, where.limit),
        leaves=state.device + state.host,
        collectives=traffic.collectives,
        seconds=took,
        schedule=parts.strategy.schedule,
        why=parts.why,
        unread=traffic.unread,
    )


def _compiled(lowered: Lowered, dump: Path | None) -> CompilerOutput:
    if dump is not None:
        return compile_and_read(lowered, dump)
    with tempfile.TemporaryDirectory() as scratch:
        return compile_and_read(lowered, Path(scratch))


def _traffic(output: CompilerOutput, layout: Mapping[str, int]) -> CollectiveTraffic:
    if output.unread:
        return CollectiveTraffic((), (f"no collective: {output.unread}",))
    return collectives(output.text, layout)


def _memory(program: Any, limit: int) -> dict[str, int]:
    said = program.memory_analysis()
    return {
        "arguments": said.argument_size_in_bytes,
        "temporaries": said.temp_size_in_bytes,
        "output": said.output_size_in_bytes,
        "aliased": said.alias_size_in_bytes,
        "host": said.host_argument_size_in_bytes + said.host_temp_size_in_bytes,
        "limit": limit,
    }


def _too_large(where: Topology, error: Exception) -> Exception:
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    sizes = re.findall(r"[\d.]+[GM](?:iB)?\b", str(error))
    said = f" (the compiler says {' of '.join(sizes[:2])})" if len(sizes) > 1 else ""
    return ConfigError(
        f"A step does not fit on a device of {where.name}{said}. Split more of it: "
        f"parallel.kind=sharded with a larger parallel.fsdp, tensor or stage; compute more once "
        f"again: model.remat=full; or take fewer rows at a time: a larger microbatches."
    )
