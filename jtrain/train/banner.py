"""Banner of a run: its size, layout, batch and durations, logged before the first step."""

from pathlib import Path
from typing import Any

import jax

from jtrain.config.dump import flatten
from jtrain.core.pytree import num_elements
from jtrain.distributed.accelerators import unused_accelerators
from jtrain.distributed.cpu_threads import count_cpu_devices, describe_small_pool
from jtrain.io.formatting import format_seconds
from jtrain.io.log import LOG
from jtrain.models.pretrained.source import describe_source
from jtrain.parallel.devices import parse_devices
from jtrain.train.program import Program
from jtrain.train.resolve import Resolved
from jtrain.train.rollback import ResumePoint
from jtrain.train.summary import format_line, summarize
from jtrain.train.supersteps import CallSchedule


def log_banner(program: Program, resume: ResumePoint) -> None:
    """Log what is trained, and from where."""
    for line in banner_lines(program.resolved, resume.schedule, resume.start):
        LOG.info(line)


def banner_lines(
    resolved: Resolved, schedule: CallSchedule, start: int | None, root: Path = Path("/")
) -> list[str]:
    """Return the lines to log before the first step.

    Args:
        root: of the file system that shows the machine's accelerators.
    """
    config, strategy = resolved.config, resolved.strategy
    count = num_elements(resolved.abstract_state.params)
    batch: Any = f"{config.batch} rows"
    if resolved.experiment.tokens:
        batch = f"{batch} of {resolved.experiment.tokens} tokens"
    microbatches = f"{config.microbatches} microbatch{'es' * (config.microbatches > 1)}"
    lines = [
        f"{config.name}: {count:,} parameters, {describe_layout(resolved)}, {batch} a step in "
        f"{strategy.shares} shard{'s' * (strategy.shares > 1)}, {microbatches}",
        *_unused(resolved, root),
        *describe_small_pool(count_cpu_devices(resolved.devices)),
        *([resolved.why] if resolved.why else []),
        *([schedule.why] if schedule.why else []),
        format_line(summarize(resolved.abstract_state)),
        *([str(strategy.schedule)] if strategy.schedule else []),
    ]
    if jax.process_count() > 1:
        lines.append(_sharding(resolved))
    steps = flatten(resolved.config)
    for key, duration in resolved.lengths.written.items():
        default = duration.unit == "%" and config.experiment == "fit"  # jt.fit sets shares
        if isinstance(steps.get(key), int) and not default:
            unit = "evaluations" if key == "evaluate.patience" else "steps"
            if duration.seconds and unit == "steps":
                unit += f" of {format_seconds(resolved.lengths.seconds)}"
            lines.append(f"{key}: {duration} is {steps[key]} {unit}")
    if not start:
        lines += describe_source(getattr(config, "model", None))
    if start:
        lines.append(f"resumes from step {start} of {config.steps}")
    return lines


def _unused(resolved: Resolved, root: Path) -> list[str]:
    """Return lines about unused accelerators, unless the config chooses a platform."""
    if parse_devices(resolved.config.parallel.devices).platform:
        return []
    used = {device.platform for device in jax.devices()}
    return unused_accelerators(used, getattr(jax.config, "jax_platforms", None), root=root)


def describe_layout(resolved: Resolved) -> str:
    """Return the kind of a layout, its devices and its axes.

    `sharded over 8 cpu devices (fsdp 4 x tensor 2)`.
    """
    devices, kind = resolved.devices, resolved.config.parallel.kind
    sizes = [f"{axis} {size}" for axis, size in resolved.strategy.axes.items()]
    axes = f" ({' x '.join(sizes)})" if len(sizes) > 1 else ""
    plural = "s" * (len(devices) > 1)
    return f"{kind} over {len(devices)} {devices[0].device_kind} device{plural}{axes}"


def _sharding(resolved: Resolved) -> str:
    """Return a line about the rows that each process reads."""
    index, count = resolved.strategy.part
    by_index = f"data: by index, this process reads part {index} of {count} of every batch's rows"
    return getattr(resolved.own_rows(resolved.experiment.train), "summary", by_index)
