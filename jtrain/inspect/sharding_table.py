"""Where each leaf of a run's state lies, by what rule, and what a device holds of it."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.core.pytree import named_leaves
from jtrain.io.formatting import columns, size
from jtrain.parallel import LeafSharding
from jtrain.train.setup import TrainSetup

COLUMNS = ("leaf", "shape", "split over", "bytes", "a device", "why")


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Leaves of one shape, split in one way, by one rule; their names differ in numbers only."""

    name: str
    """With `*` for the numbers that differ: `params/blocks/*/up/kernel`."""
    leaves: tuple[LeafSharding, ...]


@dataclasses.dataclass(frozen=True)
class ShardingTable:
    """How a run's state is laid out."""

    line: str
    """The layout in words: the kind, the axes and their sizes."""
    axes: Mapping[str, int]
    leaves: tuple[LeafSharding, ...]
    """In the order of the tree; none where the layout decides nothing of single leaves."""
    whole: int
    """Bytes of the state, once."""
    device: int
    """Bytes of it on each device."""
    host: int
    """Bytes of it in the memory of the host, for each device."""
    why: str = ""
    """The layout was chosen, if it was."""

    def plain(self) -> dict[str, Any]:
        """The same as plain numbers and names, in bytes; the axes of each dim that is split."""
        return {
            "layout": self.line,
            "why": self.why,
            "axes": dict(self.axes),
            "bytes": self.whole,
            "device_bytes": self.device,
            "host_bytes": self.host,
            "leaves": [
                {
                    "leaf": of.leaf,
                    "shape": list(of.shape),
                    "split": [list(axes) for axes in of.axes],
                    "rule": of.choice.rule,
                    "whole": of.choice.whole,
                    "bytes": of.whole,
                    "device_bytes": 0 if of.host else of.bytes,
                    "host_bytes": of.bytes if of.host else 0,
                }
                for of in self.leaves
            ],
        }


def laid(parts: TrainSetup) -> ShardingTable:
    """How the state of these parts is laid out; nothing of it is made."""
    strategy, values = parts.strategy, parts.config.parallel
    leaves = tuple(strategy.decisions(parts.like, parts.experiment.dims))
    there, impl = math.prod(strategy.axes.values()), getattr(values, "impl", "")
    if not strategy.axes:
        line = f"{values.kind}: all on one device"
    elif not leaves:
        line = f"{values.kind} by {impl}: all on each of {there} devices, rows split over them"
    else:
        sizes = " x ".join(f"{axis} {size}" for axis, size in strategy.axes.items())
        line = f"{values.kind}: {sizes}, {there} device{'s' if there > 1 else ''}"
    arrays = named_leaves(parts.like).values()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    device = sum(of.bytes for of in leaves if not of.host) if leaves else whole
    host = sum(of.bytes for of in leaves if of.host)
    return ShardingTable(line, strategy.axes, leaves, whole, device, host, parts.why)


def table(of: ShardingTable) -> str:
    """A line for leaves that are alike, in columns, under the layout and over the sums."""
    sums = f"state      {size(of.whole)} whole, {size(of.device)} on a device"
    if of.host:
        sums += f", {size(of.host)} for it in the memory of the host"
    head = [of.line, of.why] if of.why else [of.line]
    if not of.leaves:
        return "\n".join([*head, sums])
    rows = [COLUMNS, *(_row(group) for group in alike(of.leaves))]
    lines = columns(rows, right=(COLUMNS.index("bytes"), COLUMNS.index("a device")))
    return "\n".join([*head, "", *lines, "", *_sums(of), sums])


def alike(leaves: tuple[LeafSharding, ...]) -> list[LeafGroup]:
    """The leaves in groups, each where its first one stands."""
    groups: dict[tuple, list[LeafSharding]] = {}
    for of in leaves:
        pattern = tuple("*" if part.isdigit() else part for part in of.leaf.split("/"))
        groups.setdefault((pattern, of.shape, of.choice, of.bytes, of.host), []).append(of)
    return [
        LeafGroup(_common([of.leaf for of in group]), tuple(group)) for group in groups.values()
    ]


def _common(names: list[str]) -> str:
    columns = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def _row(group: LeafGroup) -> tuple[str, ...]:
    one, several = group.leaves[0], len(group.leaves)
    split = [" x ".join(axes) or "-" for axes in one.axes]
    return (
        f"{group.name} x {several}" if several > 1 else group.name,
        " x ".join(map(str, one.shape)) or "scalar",
        ", ".join(split) if any(one.axes) else "",
        size(one.whole * several),
        size(one.bytes * several),
        _why(one),
    )


def _why(one: LeafSharding) -> str:
    said = filter(None, [one.choice.rule, one.choice.whole])
    why = "; ".join(said) or "no rule: on every device"
    return f"in host memory: {why}" if one.host else why


def _sums(of: ShardingTable) -> Iterator[str]:
    for part in ("params", "extra", "opt_state"):
        leaves = [leaf for leaf in of.leaves if leaf.leaf.split("/")[0] == part]
        if leaves:
            whole, held = (sum(leaf.whole for leaf in leaves), sum(leaf.bytes for leaf in leaves))
            yield f"{part:9}  {size(whole)} whole, {size(held)} on a device"
