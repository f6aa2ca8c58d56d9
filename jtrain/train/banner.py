"""Banner: the lines that a run logs before its first step."""

from pathlib import Path
from typing import Any

import jax

from jtrain.config.dump import flatten
from jtrain.core.pytree import num_elements
from jtrain.distributed.accelerators import unused_accelerators
from jtrain.distributed.cpu_threads import count_cpu_devices, describe_small_pool
from jtrain.io.formatting import format_seconds
from jtrain.models.pretrained.source import describe_source
from jtrain.parallel.devices import parse_devices
from jtrain.train.setup import TrainSetup
from jtrain.train.summary import format_line, summarize


def banner_lines(setup: TrainSetup, start: int | None, root: Path = Path("/")) -> list[str]:
    """Return the lines to log before the first step.

    Args:
        root: of the file system that shows the machine's accelerators.
    """
    config, strategy = setup.config, setup.strategy
    count = num_elements(setup.like.params)
    batch: Any = f"{config.batch} rows"
    if setup.experiment.tokens:
        batch = f"{batch} of {setup.experiment.tokens} tokens"
    microbatches = f"{config.microbatches} microbatch{'es' * (config.microbatches > 1)}"
    lines = [
        f"{config.name}: {count:,} parameters, {describe_layout(setup)}, {batch} a step in "
        f"{strategy.shares} shard{'s' * (strategy.shares > 1)}, {microbatches}",
        *_unused(setup, root),
        *describe_small_pool(count_cpu_devices(setup.devices)),
        *([setup.why] if setup.why else []),
        *([setup.schedule.why] if setup.schedule.why else []),
        format_line(summarize(setup.like)),
        *([str(strategy.schedule)] if strategy.schedule else []),
    ]
    if jax.process_count() > 1:
        lines.append(_sharding(setup))
    steps = flatten(setup.config)
    for key, duration in setup.lengths.written.items():
        default = duration.unit == "%" and config.experiment == "fit"  # jt.fit sets shares
        if isinstance(steps.get(key), int) and not default:
            unit = "evaluations" if key == "evaluate.patience" else "steps"
            if duration.seconds and unit == "steps":
                unit += f" of {format_seconds(setup.lengths.seconds)}"
            lines.append(f"{key}: {duration} is {steps[key]} {unit}")
    if not start:
        lines += describe_source(getattr(config, "model", None))
    if start:
        lines.append(f"resumes from step {start} of {config.steps}")
    return lines


def _unused(setup: TrainSetup, root: Path) -> list[str]:
    """Return lines about unused accelerators, unless the config chooses a platform."""
    if parse_devices(setup.config.parallel.devices).platform:
        return []
    used = {device.platform for device in jax.devices()}
    return unused_accelerators(used, getattr(jax.config, "jax_platforms", None), root=root)


def describe_layout(setup: TrainSetup) -> str:
    """Return the kind of a layout, its devices and its axes.

    `sharded over 8 cpu devices (fsdp 4 x tensor 2)`.
    """
    devices, kind = setup.devices, setup.config.parallel.kind
    sizes = [f"{axis} {size}" for axis, size in setup.strategy.axes.items()]
    axes = f" ({' x '.join(sizes)})" if len(sizes) > 1 else ""
    plural = "s" * (len(devices) > 1)
    return f"{kind} over {len(devices)} {devices[0].device_kind} device{plural}{axes}"


def _sharding(setup: TrainSetup) -> str:
    """Return a line about the rows that each process reads."""
    index, count = setup.strategy.part
    by_index = f"data: by index, this process reads part {index} of {count} of every batch's rows"
    return getattr(setup.own_rows(setup.experiment.train), "summary", by_index)
