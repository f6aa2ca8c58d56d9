"""The sharding of a run's state: each leaf with its rule and its bytes on a device."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jtrain.core.pytree import named_leaves
from jtrain.io.formatting import align_columns, format_bytes
from jtrain.parallel import LeafSharding
from jtrain.train.program import Program

COLUMNS = ("leaf", "shape", "split over", "bytes", "a device", "why")


@dataclasses.dataclass(frozen=True)
class ShardingTable:
    """The sharding of a run's state, with totals."""

    line: str
    """The layout as text: the kind, the axes and their sizes."""
    axes: Mapping[str, int]
    leaves: tuple[LeafSharding, ...]
    """Leaves in the order of the tree; empty if the layout is the same for all leaves."""
    total: int
    """Bytes of the unsharded state."""
    device: int
    """Bytes of the state on each device."""
    host: int
    """Bytes of the state in host memory, for each device."""
    why: str = ""
    """The reason for an automatically chosen layout."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values, sizes in bytes, with the axes of each split dim."""
        return {
            "layout": self.line,
            "why": self.why,
            "axes": dict(self.axes),
            "bytes": self.total,
            "device_bytes": self.device,
            "host_bytes": self.host,
            "leaves": [
                {
                    "leaf": leaf.leaf,
                    "shape": list(leaf.shape),
                    "split": [list(axes) for axes in leaf.axes],
                    "rule": leaf.choice.rule,
                    "unsplit": leaf.choice.unsplit,
                    "bytes": leaf.full_bytes,
                    "device_bytes": 0 if leaf.host else leaf.bytes,
                    "host_bytes": leaf.bytes if leaf.host else 0,
                }
                for leaf in self.leaves
            ],
        }


def describe_sharding(program: Program) -> ShardingTable:
    """Return the sharding of a setup's state, from shapes alone."""
    strategy, values = program.resolved.strategy, program.resolved.config.parallel
    leaves = tuple(
        strategy.decisions(program.resolved.abstract_state, program.resolved.experiment.dims)
    )
    num_devices, impl = math.prod(strategy.axes.values()), getattr(values, "impl", "")
    if not strategy.axes:
        line = f"{values.kind}: all on one device"
    elif not leaves:
        line = (
            f"{values.kind} by {impl}: all on each of {num_devices} devices, rows split over them"
        )
    else:
        sizes = " x ".join(f"{axis} {size}" for axis, size in strategy.axes.items())
        line = f"{values.kind}: {sizes}, {num_devices} device{'s' if num_devices > 1 else ''}"
    arrays = named_leaves(program.resolved.abstract_state).values()
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    device = sum(leaf.bytes for leaf in leaves if not leaf.host) if leaves else total
    host = sum(leaf.bytes for leaf in leaves if leaf.host)
    return ShardingTable(line, strategy.axes, leaves, total, device, host, program.resolved.why)


def format_sharding(sharding: ShardingTable) -> str:
    """Return the table as text: the layout, a line for each group of leaves, and the totals."""
    sums = (
        f"state      {format_bytes(sharding.total)} in total, "
        f"{format_bytes(sharding.device)} on a device"
    )
    if sharding.host:
        sums += f", {format_bytes(sharding.host)} for it in host memory"
    head = [sharding.line, sharding.why] if sharding.why else [sharding.line]
    if not sharding.leaves:
        return "\n".join([*head, sums])
    rows = [COLUMNS, *(_row(*group) for group in group_leaves(sharding.leaves))]
    lines = align_columns(rows, right=(COLUMNS.index("bytes"), COLUMNS.index("a device")))
    return "\n".join([*head, "", *lines, "", *_sums(sharding), sums])


def group_leaves(leaves: Sequence[LeafSharding]) -> list[tuple[str, list[LeafSharding]]]:
    """Return leaves with one shape, sharding and rule whose names differ only in numbers.

    The name of a group has `*` for the numbers that differ: `params/blocks/*/up/kernel`.
    """
    groups: dict[tuple, list[LeafSharding]] = {}
    for leaf in leaves:
        pattern = tuple("*" if part.isdigit() else part for part in leaf.leaf.split("/"))
        key = (pattern, leaf.shape, leaf.choice, leaf.bytes, leaf.host)
        groups.setdefault(key, []).append(leaf)
    return [(_common([leaf.leaf for leaf in group]), group) for group in groups.values()]


def _common(names: list[str]) -> str:
    columns = zip(*(name.split("/") for name in names), strict=True)
    return "/".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def _row(name: str, group: Sequence[LeafSharding]) -> tuple[str, ...]:
    leaf, count = group[0], len(group)
    split = [" x ".join(axes) or "-" for axes in leaf.axes]
    why = "; ".join(filter(None, [leaf.choice.rule, leaf.choice.unsplit]))
    why = why or "no rule: on every device"
    return (
        f"{name} x {count}" if count > 1 else name,
        " x ".join(map(str, leaf.shape)) or "scalar",
        ", ".join(split) if any(leaf.axes) else "",
        format_bytes(leaf.full_bytes * count),
        format_bytes(leaf.bytes * count),
        f"in host memory: {why}" if leaf.host else why,
    )


def _sums(sharding: ShardingTable) -> Iterator[str]:
    for part in ("params", "extra", "opt_state"):
        leaves = [leaf for leaf in sharding.leaves if leaf.leaf.split("/")[0] == part]
        if leaves:
            total, local = (
                sum(leaf.full_bytes for leaf in leaves),
                sum(leaf.bytes for leaf in leaves),
            )
            yield f"{part:9}  {format_bytes(total)} in total, {format_bytes(local)} on a device"
