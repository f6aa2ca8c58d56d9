"""A layout chosen by memory: the first that fits, where devices exchange ever more."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.pytree import named_leaves
from jtrain.errors import ConfigError, UserError
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import Device, devices
from jtrain.parallel.leaf_sharding import Zero, leaf_dims
from jtrain.parallel.memory import device_memory
from jtrain.parallel.memory_estimate import MemoryEstimate, MemoryNeeds, estimate, gb
from jtrain.parallel.rules import AXES, STATE, UNEVEN
from jtrain.parallel.strategies.base_config import BaseParallelConfig
from jtrain.parallel.strategies.mesh_axes import Axes
from jtrain.parallel.strategies.single import Single

USABLE = 0.75  # of a device's memory: programs took up to 1.3 times their estimate (docs/axes.md)
SAID = 4  # layouts that were too large, in words
INSIDE = (1, 2, 4, 8)  # sizes of `tensor` and `context`: of neighbours, on any slice


class AutoChoice(NamedTuple):
    """A layout, and why it was taken."""

    layout: Single | Axes
    why: str


@configclass
class Auto(BaseParallelConfig):
    """The layout in which devices exchange least, of those that fit their memory.

    What fits is estimated by shapes: the state, the copy of the parameters that is computed with,
    gradients, and what the forward pass keeps. `jtrain plan` asks the compiler.
    """

    kind: Literal["auto"] = "auto"
    devices: Devices = 0
    """Devices of each process: how many, 0 for all; or which: their indices, [0, 2], or cpu, gpu:1,
    [gpu:0, gpu:1]. A CPU is cut into as many as are asked for."""
    memory: float = Field(default=0.0, ge=0)
    """GB that the estimate may come to on a device; 0: 75 % of what it has."""
    min_size: int = Field(default=4096, ge=0)
    """Leaves of fewer elements are not split."""

    def among(self, given: Sequence[Device] | None) -> list[Device]:
        """The devices that are to be split over: those of this machine, or as many of `given`."""
        return devices(self.devices, given)

    def choose(
        self, needs: MemoryNeeds, there: Sequence[Device], check: Callable[[Axes], None]
    ) -> AutoChoice:
        """The layout over these devices.

        Tried one after the other: all on every device; the optimizer's state split; gradients, too,
        if microbatches are summed; parameters, too; all of these with `tensor` and `context` of 2,
        4 and 8; last, the optimizer's state in the memory of the host. If nothing fits, what takes
        least is taken.

        Args:
            check: raises a UserError for a layout that does not suit the model.

        Raises:
            ConfigError: if the rows divide into none.
        """
        if len(there) == 1:
            return AutoChoice(Single(start_timeout=self.start_timeout), "auto: there is one device")
        limit = int(self.memory * 1e9 or USABLE * device_memory(there))
        tried: list[tuple[MemoryEstimate, Axes]] = []
        unfit: dict[str, None] = {}
        for splits in self._splits(there, needs):
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
                f"{len(there)} devices{''.join(f'; {why}' for why in unfit)}. Set "
                f"batch={len(there) * needs.microbatches}, or fewer parallel.devices."
            )
        least = min(range(len(tried)), key=lambda i: tried[i][0].total)
        return AutoChoice(tried[least][1], _why(tried, least, limit, unfit))

    def _splits(self, there: Sequence[Device], needs: MemoryNeeds) -> Iterator[Axes]:
        """What more than state and rows may be split over, in the order in which it is tried.

        Experts are on devices of their own wherever there are some.
        """
        slices = len({getattr(device, "slice_index", 0) or 0 for device in there})
        found: list[Axes] = []
        inside = [(tensor, context) for context in INSIDE for tensor in INSIDE]
        for tensor, context in sorted(inside, key=lambda of: of[0] * of[1]):
            rows, rest = divmod(len(there), slices * tensor * context)
            if rest or needs.rows % (slices * rows) or not _divides(needs, tensor, context):
                continue
            experts = math.gcd(rows, *_sizes(needs).get("experts", [1]))
            of = Axes(
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
            found += [of, dataclasses.replace(of, context_by="ulysses")] if context > 1 else [of]
        yield from found
        if there[0].platform != "cpu":  # whose memory is the host's
            yield from (dataclasses.replace(of, offload=("opt_state",)) for of in found)


def _stages(of: Axes, needs: MemoryNeeds) -> Iterator[Axes]:
    """The same with ever more of the state split."""
    stages: tuple[Zero, ...] = (0, 1, 2, 3) if needs.microbatches > 1 else (0, 1, 3)
    for zero in (3,) if of.offload or of.fsdp == 1 else stages:
        copies = {"data": of.fsdp, "fsdp": 1} if zero == 0 else {}
        yield dataclasses.replace(of, zero=zero, **copies)


def _divides(needs: MemoryNeeds, tensor: int, context: int) -> bool:
    """Whether heads, and what each device of `context` has of a row, are whole.

    A device has two parts of a row, one early and one late (`jtrain.parallel.attention.zigzag`).
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
    """The sizes of the dims of parameters, by their names."""
    found: dict[str, set[int]] = {}
    for leaf, array in named_leaves(needs.state.params).items():
        for name, size in zip(
            leaf_dims(leaf, array.ndim, needs.dims) or (), array.shape, strict=False
        ):
            found.setdefault(str(name), set()).add(size)
    return found


def _said(layout: Axes) -> str:
    """`fsdp 4 x tensor 2, zero 3`."""
    sizes = " x ".join(f"{a} {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1)
    zero = f", zero {layout.zero}" if layout.zero and layout.fsdp > 1 else ""
    return f"{sizes}{zero}{', offload opt_state' if layout.offload else ''}"


def _why(
    tried: Sequence[tuple[MemoryEstimate, Axes]], taken: int, limit: int, unfit: Iterable[str]
) -> str:
    takes, layout = tried[taken]
    of = f" of {gb(limit)}" if limit else "; how much there is, is not known"
    fits = not limit or takes.total <= limit
    words = "" if fits else ", the least of all: it may not fit"
    others = [f"{_said(of)} {gb(size.total)}" for size, of in tried if of is not layout]
    more = f" and {len(others) - SAID} more" if len(others) > SAID else ""
    large = f"; too large, in GB: {', '.join(others[:SAID])}{more}" if others else ""
    return f"auto: {_said(layout)}, about {takes}{of}{words}{large}" + "".join(
        f"; not taken: {why}" for why in unfit
    )
