"""What a run says before its first step."""

from typing import Any

import jax

from jtrain.assemble import Assembly
from jtrain.config.dump import flat
from jtrain.hooks.readable import brief
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
        *([parts.why] if parts.why else []),
        short(summary(parts.like)),
        *([str(strategy.schedule)] if strategy.schedule else []),
    ]
    if jax.process_count() > 1:
        lines.append(_shared(parts))
    now = flat(parts.config)
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


def _shared(parts: Assembly) -> str:
    """How the processes share out what is read."""
    index, count = parts.strategy.part
    by_index = f"data: by index, this process reads part {index} of {count} of every batch's rows"
    return getattr(parts.mine(parts.experiment.train), "told", by_index)
