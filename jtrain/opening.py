"""What a run says before its first step."""

from typing import Any

import jax

from jtrain.assemble import Assembly
from jtrain.config.dump import flat
from jtrain.summary import short, summary
from jtrain.trees import elements


def opening(parts: Assembly, start: int | None) -> list[str]:
    """What a reader wants to know before the first step."""
    config, strategy = parts.config, parts.strategy
    count = elements(parts.like.params)
    batch: Any = f"{config.batch} rows"
    if parts.experiment.tokens:
        batch = f"{batch} of {parts.experiment.tokens} tokens"
    lines = [
        f"{config.name}: {count:,} parameters, {config.parallel.kind} over {strategy.shares} "
        f"{jax.devices()[0].device_kind} device{'s' if strategy.shares > 1 else ''}, "
        f"{batch} a step, {config.microbatches} microbatch"
        + ("es" if config.microbatches > 1 else ""),
        short(summary(parts.like)),
    ]
    now = flat(parts.config)
    lines += [
        f"{key}: {said} is {now[key]} steps"
        for key, said in parts.lengths.items()
        if isinstance(now.get(key), int)
    ]
    if start:
        lines.append(f"goes on from step {start} of {config.steps}")
    return lines
