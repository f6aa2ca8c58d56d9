"""What a run says before its first step."""

from pathlib import Path
from typing import Any

import jax

from jtrain.config.dump import flatten
from jtrain.core.pytree import num_elements
from jtrain.distributed.accelerators import unused_accelerators
from jtrain.io.formatting import brief
from jtrain.parallel.device_names import parse_devices
from jtrain.train.setup import TrainSetup
from jtrain.train.summary import short, summary


def opening(parts: TrainSetup, start: int | None, root: Path = Path("/")) -> list[str]:
    """What a reader wants to know before the first step.

    Args:
        root: of the file system that shows what accelerators the machine has.
    """
    config, strategy = parts.config, parts.strategy
    count = num_elements(parts.like.params)
    batch: Any = f"{config.batch} rows"
    if parts.experiment.tokens:
        batch = f"{batch} of {parts.experiment.tokens} tokens"
    microbatches = f"{config.microbatches} microbatch{'es' * (config.microbatches > 1)}"
    lines = [
        f"{config.name}: {count:,} parameters, {layout(parts)}, {batch} a step in "
        f"{strategy.shares} shard{'s' * (strategy.shares > 1)}, {microbatches}",
        *_unused(parts, root),
        *([parts.why] if parts.why else []),
        short(summary(parts.like)),
        *([str(strategy.schedule)] if strategy.schedule else []),
    ]
    if jax.process_count() > 1:
        lines.append(_shared(parts))
    now = flatten(parts.config)
    for key, said in parts.lengths.said.items():
        of_fit = said.unit == "%" and config.experiment == "fit"  # which says a share by default
        if isinstance(now.get(key), int) and not of_fit:
            unit = "evaluations" if key == "evaluate.patience" else "steps"
            if said.seconds and unit == "steps":
                unit += f" of {brief(parts.lengths.seconds)}"
            lines.append(f"{key}: {said} is {now[key]} {unit}")
    if start:
        lines.append(f"goes on from step {start} of {config.steps}")
    return lines


def _unused(parts: TrainSetup, root: Path) -> list[str]:
    """Say what accelerators the run leaves unused, unless its config chooses a platform."""
    if parse_devices(parts.config.parallel.devices).platform:
        return []
    seen = {device.platform for device in jax.devices()}
    return unused_accelerators(seen, getattr(jax.config, "jax_platforms", None), root=root)


def layout(parts: TrainSetup) -> str:
    """Return the kind of a layout, its devices and its axes.

    `sharded over 8 cpu devices (fsdp 4 x tensor 2)`.
    """
    there = parts.devices
    sizes = [f"{axis} {size}" for axis, size in parts.strategy.axes.items()]
    of = f" ({' x '.join(sizes)})" if len(sizes) > 1 else ""
    plural = "s" * (len(there) > 1)
    return (
        f"{parts.config.parallel.kind} over {len(there)} {there[0].device_kind} device{plural}{of}"
    )


def _shared(parts: TrainSetup) -> str:
    """How the processes share out what is read."""
    index, count = parts.strategy.part
    by_index = f"data: by index, this process reads part {index} of {count} of every batch's rows"
    return getattr(parts.mine(parts.experiment.train), "summary", by_index)
