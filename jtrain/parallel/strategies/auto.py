"""Automatic choice of a layout: the first that fits in memory, in order of communication."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Dims
from jtrain.errors import ConfigError, UserError
from jtrain.parallel.chips import find_chip
from jtrain.parallel.devices import Device, devices
from jtrain.parallel.leaf_sharding import StateSharding, Zero, leaf_dims
from jtrain.parallel.mesh import count_slices
from jtrain.parallel.rules import AXES, STATE, UNEVEN
from jtrain.parallel.strategies.sharded import FSDP, Axes
from jtrain.parallel.strategies.single import Single
from jtrain.parallel.strategies.strategy import BaseParallelConfig


class MemoryNeeds(NamedTuple):
    """Memory needs of a step before sharding."""

    state: Any
    """Shapes and dtypes of a TrainState."""
    dims: Mapping[str, Dims]
    rows: int
    """Rows of a microbatch."""
    microbatches: int
    tokens: int
    """Tokens of a row; 0: rows have no time."""
    compute: Any
    """Dtype of the compute copy of the parameters; None: no copy."""
    saved: int
    """Bytes that the forward pass of a microbatch saves for the backward pass."""
    passing: int = 0
    """Bytes that the largest recomputed region saves for itself."""
    gathered: int = 0
    """Bytes of the weights of that region."""


class MemoryEstimate(NamedTuple):
    """Estimated bytes on each device."""

    state: int
    copies: int  # compute copies of the parameters, and gradients
    saved: int  # by the forward pass for the backward pass
    passing: int  # in the recomputed region, and its weights

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {gb(size)}" for what, size in self._asdict().items())
        return f"{gb(self.total)} GB a device ({parts})"


def gb(size: int) -> str:
    """Format bytes as GB, with three digits."""
    return f"{size / 1e9:.3g}"


def estimate(layout: Axes, needs: MemoryNeeds) -> MemoryEstimate:
    """Estimate the bytes on a device for a layout whose sizes are all set.

    Gradients have the compute dtype until they are summed over microbatches in float32. Saved
    activations are split over the rows, the shards of a sequence and, with `sequence`, over
    `tensor`. One recomputed region exists at a time, with its weights gathered.
    """
    sizes, zero = {axis: getattr(layout, axis) for axis in AXES}, layout.zero
    leaves = StateSharding(sizes, zero, layout.min_size)
    state = sum(
        leaf.bytes
        for leaf in leaves.decisions(needs.state, needs.dims)
        if leaf.leaf.split("/")[0] not in layout.offload
    )

    def params(sharding: StateSharding, split: bool, dtype: Any) -> int:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), needs.state.params
        )
        return sum(leaf.bytes for leaf in sharding.decisions(like, needs.dims, split=split))

    used = params(leaves.used, zero == 3, needs.compute)
    stored = params(leaves, zero == 3, None)
    copy = used if needs.compute is not None or used != stored else 0
    gradient = params(leaves, zero > 1, needs.compute)
    if needs.microbatches > 1:
        gradient += params(leaves, zero > 1, jnp.float32)
    time = layout.context * (layout.tensor if layout.sequence else 1)
    shards = layout.slice * layout.data * layout.fsdp * layout.expert * time
    passing = needs.passing // shards
    if zero == 3 and layout.fsdp > 1:
        passing += needs.gathered // (layout.tensor * layout.expert)
    return MemoryEstimate(state, copy + gradient, needs.saved // shards, passing)


def device_memory(devices: Sequence[Device]) -> int:
    """Return the bytes for a program on each device, the same in all processes; 0: not known.

    The devices of a CPU share the memory of the machine.
    """
    chip = find_chip(devices)
    if chip is not None and chip.gib:
        return int(chip.gib * 2**30)
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local and local[0].platform == "cpu":
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(local)
    else:
        size = min(((d.memory_stats() or {}).get("bytes_limit", 0) for d in local), default=0)
    if jax.process_count() == 1:
        return size
    return int(multihost_utils.process_allgather(np.float32(size)).min())


def choose_slices(
    layout: FSDP, available: Sequence[Device], needs: Callable[[], MemoryNeeds]
) -> tuple[FSDP, str]:
    """Return `fsdp` with its slices replicated, if they fit, and the reason.

    Args:
        needs: traces the loss; called only for several slices.
    """
    count = count_slices(available)
    if layout.slices != "auto" or count == 1:
        return layout, ""
    within = len(available) // count
    axes = Axes(slice=count, fsdp=within, min_size=layout.min_size, offload=layout.offload)
    takes, limit = estimate(axes, needs()), int(USABLE * device_memory(available))
    fits = not limit or takes.total <= limit
    sizes = f"{gb(takes.total)} of {gb(limit)} GB a device" if limit else "the memory is not known"
    chosen, other = ("replicate", "shard") if fits else ("shard", "replicate")
    how = f"sharded within each of {count} slices" if fits else f"sharded over all {count} slices"
    why = f"fsdp: {how}, as a replica in each {'fits' if fits else 'does not fit'} ({sizes})"
    return (
        dataclasses.replace(layout, slices=chosen),
        f"{why}; parallel.slices={other} takes the other way",
    )


USABLE = 0.75  # of a device's memory: programs took up to 1.3 times their estimate (docs/axes.md)
LISTED = 4  # layouts that are too large, in the message
INSIDE = (1, 2, 4, 8)  # sizes of `tensor` and `context`, for neighbours on any slice


class AutoChoice(NamedTuple):
    """A layout, and the reason for it."""

    layout: Single | Axes
    why: str


@configclass
class Auto(BaseParallelConfig):
    """The layout with the least communication among those that fit in memory.

    Memory is estimated from shapes: the state, the compute copy of the parameters, gradients, and
    saved activations. `jtrain plan` has the compiler's numbers.
    """

    kind: Literal["auto"] = "auto"
    memory: float = Field(default=0.0, ge=0)
    """Limit of the estimate on a device in GB; 0: 75 % of the device's memory."""
    min_size: int = Field(default=4096, ge=0)
    """Smallest number of elements of a leaf that is split."""

    def among(self, given: Sequence[Device] | None) -> list[Device]:
        """Return the devices of the layout: those of this machine, or as many of `given`."""
        return devices(self.devices, given)

    def choose(
        self, needs: MemoryNeeds, available: Sequence[Device], check: Callable[[Axes], None]
    ) -> AutoChoice:
        """Choose the layout over these devices.

        In order: everything replicated; the optimizer's state split; gradients too, if microbatches
        are summed; parameters too; all of these with `tensor` and `context` of 2, 4 and 8; last,
        the optimizer's state in the memory of the host. If no layout fits, the smallest is taken.

        Args:
            check: raises a UserError for a layout that does not suit the model.

        Raises:
            ConfigError: if the rows divide into no layout.
        """
        if len(available) == 1:
            return AutoChoice(Single(start_timeout=self.start_timeout), "auto: there is one device")
        limit = int(self.memory * 1e9 or USABLE * device_memory(available))
        tried: list[tuple[MemoryEstimate, Axes]] = []
        unfit: dict[str, None] = {}
        for splits in self._splits(available, needs):
            try:
                check(splits)
            except UserError as error:
                unfit[str(error).partition(". ")[0]] = None
                continue
            for layout in _stages(splits, needs):
                tried.append((estimate(layout, needs), layout))
                if not limit or tried[-1][0].total <= limit:
                    return AutoChoice(layout, _why(tried, -1, limit, unfit))
        if not tried:
            raise ConfigError(
                f"parallel.kind=auto: {needs.rows} rows of a microbatch divide into no layout of "
                f"{len(available)} devices{''.join(f'; {why}' for why in unfit)}. Set "
                f"batch={len(available) * needs.microbatches}, or fewer parallel.devices."
            )
        least = min(range(len(tried)), key=lambda i: tried[i][0].total)
        return AutoChoice(tried[least][1], _why(tried, least, limit, unfit))

    def layouts(self, available: Sequence[Device], needs: MemoryNeeds) -> Iterator[Axes]:
        """Yield the layouts over these devices, in the order in which `choose` tries them."""
        for splits in self._splits(available, needs):
            yield from _stages(splits, needs)

    def _splits(self, available: Sequence[Device], needs: MemoryNeeds) -> Iterator[Axes]:
        """Yield layouts with their axes beside state and rows, in the order of the search.

        Experts, if any, are on devices of their own.
        """
        slices = len({getattr(device, "slice_index", 0) or 0 for device in available})
        found: list[Axes] = []
        inside = [(tensor, context) for context in INSIDE for tensor in INSIDE]
        for tensor, context in sorted(inside, key=math.prod):
            rows, rest = divmod(len(available), slices * tensor * context)
            if rest or needs.rows % (slices * rows) or not _divides(needs, tensor, context):
                continue
            experts = math.gcd(rows, *_sizes(needs).get("experts", [1]))
            layout = Axes(
                devices=self.devices,
                slice=slices,
                fsdp=rows // experts,
                expert=experts,
                context=context,
                tensor=tensor,
                sequence=tensor > 1 and needs.tokens > 0 and needs.tokens % (tensor * context) == 0,
                min_size=self.min_size,
                start_timeout=self.start_timeout,
            )
            found.append(layout)
            if context > 1:
                found.append(dataclasses.replace(layout, context_by="ulysses"))
        yield from found
        if available[0].platform != "cpu":  # a CPU's memory is the host's
            yield from (dataclasses.replace(layout, offload=("opt_state",)) for layout in found)


def _stages(layout: Axes, needs: MemoryNeeds) -> Iterator[Axes]:
    stages: tuple[Zero, ...] = (0, 1, 2, 3) if needs.microbatches > 1 else (0, 1, 3)
    for zero in (3,) if layout.offload or layout.fsdp == 1 else stages:
        copies = {"data": layout.fsdp, "fsdp": 1} if zero == 0 else {}
        yield dataclasses.replace(layout, zero=zero, **copies)


def _divides(needs: MemoryNeeds, tensor: int, context: int) -> bool:
    """Return whether heads divide by `tensor`, and rows by `context`.

    A device has two chunks of a row, one early and one late (`jtrain.parallel.attention.ring`).
    """
    if context > 1 and (not needs.tokens or needs.tokens % (2 * context)):
        return False
    if tensor == 1:
        return True
    split = {name for name, axes in STATE.items() if "tensor" in axes}
    found = _sizes(needs)
    has = split & set(found)
    return bool(has) and all(size % tensor == 0 for name in has & UNEVEN for size in found[name])


def _sizes(needs: MemoryNeeds) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for leaf, array in named_leaves(needs.state.params).items():
        for name, size in zip(
            leaf_dims(leaf, array.ndim, needs.dims) or (), array.shape, strict=False
        ):
            found.setdefault(str(name), set()).add(size)
    return found


def _format(layout: Axes) -> str:
    """Format a layout as `fsdp 4 x tensor 2, zero 3`."""
    sizes = " x ".join(f"{a} {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1)
    zero = f", zero {layout.zero}" if layout.zero and layout.fsdp > 1 else ""
    return f"{sizes}{zero}{', offload opt_state' if layout.offload else ''}"


def _why(
    tried: Sequence[tuple[MemoryEstimate, Axes]], taken: int, limit: int, unfit: Iterable[str]
) -> str:
    takes, layout = tried[taken]
    of_limit = f" of {gb(limit)}" if limit else "; the memory is not known"
    fits = not limit or takes.total <= limit
    words = "" if fits else ", the least of all: it may not fit"
    others = [f"{_format(other)} {gb(size.total)}" for size, other in tried if other is not layout]
    more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
    large = f"; too large, in GB: {', '.join(others[:LISTED])}{more}" if others else ""
    return f"auto: {_format(layout)}, about {takes}{of_limit}{words}{large}" + "".join(
        f"; not taken: {why}" for why in unfit
    )
