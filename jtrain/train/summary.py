"""Summary of a run: its leaves, their bytes on a device, the FLOPs of a step, and its banner."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jtrain.config.dump import flatten
from jtrain.config.schema import format_value
from jtrain.core.loss import combine, normalize_loss
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.state import TrainState
from jtrain.distributed.accelerators import unused_accelerators
from jtrain.distributed.cpu_threads import count_cpu_devices, describe_small_pool
from jtrain.io.formatting import format_bytes, format_seconds
from jtrain.models.pretrained.values import describe_source
from jtrain.parallel.devices import parse_devices
from jtrain.parallel.offload import device_shardings
from jtrain.train.call_schedule import CallSchedule
from jtrain.train.flops import count_flops, count_model_flops
from jtrain.train.program import Program
from jtrain.train.resolve import Resolved


class LeafSize(NamedTuple):
    """Size of a leaf."""

    name: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    """Shape of the shard on one device."""
    dtype: str
    numbers: int
    bytes: int
    device_bytes: int


class StateBytes(NamedTuple):
    """Bytes of a part of the state: in total, and on one device."""

    total: int
    device: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """Sizes of a run, computed without allocating it."""

    leaves: tuple[LeafSize, ...]
    """Leaves of the parameters, in the order of their tree."""
    parts: Mapping[str, StateBytes]
    """Bytes of params, extra and optimizer."""

    @property
    def numbers(self) -> int:
        """Number of parameters."""
        return sum(leaf.numbers for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state on one device."""
        return sum(part.device for part in self.parts.values())


def summarize(abstract_state: TrainState) -> Summary:
    """Return the sizes of a state, given as shapes, dtypes and shardings."""
    trees = {"params": abstract_state.params, "extra": abstract_state.extra}
    leaves = {n: _leaves(x) for n, x in (trees | {"optimizer": abstract_state.opt_state}).items()}
    total = lambda part: sum(leaf.bytes for leaf in part)
    device = lambda part: sum(leaf.device_bytes for leaf in part)
    parts = {name: StateBytes(total(part), device(part)) for name, part in leaves.items()}
    return Summary(leaves["params"], parts)


def _leaves(tree: Any) -> tuple[LeafSize, ...]:
    leaves = []
    for name, leaf in named_leaves(tree).items():
        shard, size = tuple(leaf.sharding.shard_shape(leaf.shape)), leaf.dtype.itemsize
        sizes = leaf.size, leaf.size * size, math.prod(shard) * size
        leaves.append(LeafSize(name, tuple(leaf.shape), shard, str(leaf.dtype), *sizes))
    return tuple(leaves)


class StepFlops(NamedTuple):
    """FLOPs in the products of loss and gradient over the whole batch; None where unknown."""

    model: float | None
    """Without what is computed twice."""
    hardware: float | None
    """With what the backward pass computes again."""


def count_step_flops(program: Program, *, lower_bound: bool = False) -> StepFlops:
    """Return the FLOPs of loss and gradient over the whole batch.

    They are counted by tracing, without compiling or using a device. Products in the optimizer
    (Muon's) are not included.

    Args:
        lower_bound: a loop of unknown length counts as one turn, an unknown kernel as nothing.

    Raises:
        LossError: if the loss breaks its contract.
        DataError: if the first batch cannot be read.
    """
    x = program.resolved.experiment
    abstract_state = device_shardings(program.resolved.abstract_state)
    terms = normalize_loss(program.loss, ragged=x.train.ragged)

    def loss(params, extra, batch, key):
        output = terms(params, extra, batch, key)
        return combine(output.terms)

    args = (
        abstract_state.params,
        abstract_state.extra,
        x.train[0],
        jax.eval_shape(TrainState.step_key, abstract_state),
    )
    model = count_model_flops(loss, *args, lower_bound=lower_bound)
    return StepFlops(model, count_flops(jax.grad(loss), *args, lower_bound=lower_bound))


def bound_step_flops(program: Program) -> tuple[StepFlops, bool]:
    """Return the FLOPs of `count_step_flops`, or a lower bound and False where they are unknown."""
    known = count_step_flops(program)
    exact = None not in known
    return known if exact else count_step_flops(program, lower_bound=True), exact


def format_line(sizes: Summary) -> str:
    """Return the sums in one line, for the log of a run."""
    params, extra, optimizer = (format_bytes(part.total) for part in sizes.parts.values())
    carried = f", {extra} beside them" if sizes.parts["extra"].total else ""
    return (
        f"{len(sizes.leaves)} leaves of {params}{carried}, {optimizer} of the optimizer; "
        f"a device holds {format_bytes(sizes.device_bytes)} of state"
    )


def banner_lines(
    resolved: Resolved, schedule: CallSchedule, start: int | None, root: Path = Path("/")
) -> list[str]:
    """Return the lines to log before the first step."""
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
        *_describe_stages(resolved),
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
            number = steps[key]
            unit = "evaluation" if key == "evaluate.patience" else "step"
            unit += "s" * (number != 1)
            if duration.seconds and unit.startswith("step"):
                unit += f" of {format_seconds(resolved.lengths.seconds)}"
            lines.append(f"{key}: {duration} is {number} {unit}")
    if not start:
        lines += describe_source(getattr(config, "model", None))
    if start:
        lines.append(f"resumes from step {start} of {config.steps}")
    return lines


def _describe_stages(resolved: Resolved) -> list[str]:
    """Return a line about each stage and its program; none of a run without stages."""
    config, rate = resolved.config, resolved.lr_factor or (lambda step: 1.0)
    lines = [f"{len(resolved.stages) + 1} programs, each compiled once:"] if resolved.stages else []
    for stage, values in zip(config.stages, resolved.stages, strict=False):
        sets = {**stage.set, "microbatches": values.config.microbatches}
        written = ", ".join(f"{key}={format_value(value)}" for key, value in sets.items())
        factor = float(rate(stage.until - 1))
        scaled = f", learning rate x {factor:.3g}" * (factor != 1)
        lines.append(f"  to step {stage.until}: {written}{scaled}")
    if config.stages and config.stages[-1].until >= config.steps:
        lines.append(f"  the run ends at step {config.steps}, before its own values hold")
    return lines


def _unused(resolved: Resolved, root: Path) -> list[str]:
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
    index, count = resolved.strategy.part
    by_index = f"data: by index, this process reads part {index} of {count} of every batch's rows"
    return getattr(resolved.own_rows(resolved.experiment.train), "summary", by_index)
