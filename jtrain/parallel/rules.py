"""Sharding rules: the mesh axes of each named dim, in one table."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.sharding import PartitionSpec as P

from jtrain.core.types import Dims
from jtrain.errors import ShardingError

Sizes: TypeAlias = Mapping[str, int]  # of the axes of a mesh; a missing axis has size 1

# Outermost first: neighbours in the last axes have the fastest links.
AXES = ("slice", "stage", "data", "fsdp", "expert", "context", "tensor")
# The axes of the rows of a batch. Stages too: outside of the layers they would be idle.
ROWS = ("stage", "slice", "data", "fsdp", "expert")
SPLIT = "fsdp"  # the axis that only splits the state
SPLITS = (SPLIT, "context", "expert")  # and axes that split replicated state too

# Earlier names have priority; an axis splits one dim of an array.
STATE: Mapping[str, tuple[str, ...]] = {
    "layers": ("stage",),
    "experts": ("expert",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "hidden": ("tensor",),
    "vocab": ("tensor",),
    "width": (SPLIT,),
}
UNEVEN = {"heads", "kv_heads", "experts", "stages"}  # dims that must divide evenly


def activations(
    *, split: bool = True, sequence: bool = False, copies: tuple[str, ...] = ()
) -> Mapping[str, tuple[str, ...]]:
    """Return the rules of activations.

    Args:
        split: split gradients over `fsdp`. Then the dim `split` is sharded like the gradients
            (looked-up embeddings, the sum of a gradient), and `group` is the rows of all devices
            that have a shard of it.
        sequence: split `time` over `tensor` too, where no other dim is.
        copies: axes whose devices have a replica of a pipeline's layers each, with a dim of that
            name; `batch` is the rest of the rows inside.
    """
    return {
        "stages": ("stage",),
        "experts": ("expert",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "hidden": ("tensor",),
        "vocab": ("tensor",),
        "rows": ROWS,
        "copies": copies,
        "batch": tuple(axis for axis in ROWS if axis not in ("stage", *copies)),
        "group": tuple(axis for axis in ROWS if axis != SPLIT or not split),
        "time": ("context", "tensor") if sequence else ("context",),
        "split": (SPLIT,) if split else (),
    }


def copies_of(zero: int, gather: str = "turn") -> tuple[str, ...]:
    """Return the axes over which gradients are replicas until they are summed, by `zero`.

    With `gather` "step" these include `fsdp`, whatever is split between steps. `expert` is not
    among them, as its devices exchange tokens.
    """
    split = zero > 1 and gather == "turn"
    return ("slice", "data") if split else ("slice", "data", SPLIT)


class DimSplit(NamedTuple):
    """Split of an array, with its reasons."""

    spec: P = P()
    rules: tuple[str, ...] = ()  # rules that apply, such as `width -> fsdp`
    left: tuple[str, ...] = ()  # why dims with a rule are unsharded

    @property
    def rule(self) -> str:
        """Rules that apply, in words; empty without one."""
        return ", ".join(self.rules)

    @property
    def unsplit(self) -> str:
        """Reasons for unsharded dims, in words; empty without one."""
        return ", ".join(self.left)


def split_named(shape: Sequence[int], dims: Dims, rules: Mapping, sizes: Sizes) -> DimSplit:
    """Split named dims over the axes of their rules that divide them."""
    taken: list[list[str]] = [[] for _ in shape]
    applied, left, used = [], [], set()
    for name, axes in rules.items():
        for dim in (i for i, d in enumerate(dims) if d == name):
            for axis in axes:
                if sizes.get(axis, 1) == 1 or axis in used:
                    continue
                parts = math.prod(sizes[a] for a in taken[dim]) * sizes[axis]
                if shape[dim] % parts:
                    left.append(f"{name} {shape[dim]} is not a multiple of {axis} {parts}")
                    continue
                taken[dim].append(axis)
                used.add(axis)
            if taken[dim]:
                applied.append(f"{name} -> {' x '.join(taken[dim])}")
    return DimSplit(spec(taken), tuple(applied), tuple(left))


def split_largest(shape: Sequence[int], choice: DimSplit, axis: str, sizes: Sizes) -> DimSplit:
    """Split the largest dim that `axis` divides over that axis too."""
    taken = [list(axes_of(choice.spec, dim)) for dim in range(len(shape))]
    local = lambda dim: shape[dim] // math.prod(sizes[a] for a in taken[dim])
    fits = [dim for dim in range(len(shape)) if local(dim) and local(dim) % sizes[axis] == 0]
    if not fits:
        why = f"no dim of {list(shape)} is a multiple of {axis} {sizes[axis]}"
        return choice._replace(left=(*choice.left, why))
    dim = max(fits, key=local)
    taken[dim].append(axis)
    rule = f"largest dim, {shape[dim]} -> {axis}"
    return DimSplit(spec(taken), (*choice.rules, rule), choice.left)


def split_evenly(shape: Sequence[int], dims: Dims, rules: Mapping, sizes: Sizes) -> DimSplit:
    """Split as `split_named` does; raise if an axis does not divide heads, experts or stages.

    Raises:
        ShardingError: with the axis, and the sizes that divide.
    """
    for size, name in zip(shape, dims, strict=True):
        if name not in UNEVEN:
            continue
        for axis in rules[name]:
            parts = sizes.get(axis, 1)
            if size % parts:
                fits = ", ".join(str(n) for n in range(1, parts + 1) if size % n == 0)
                or_heads = " (heads, where no kv_heads are given)" * (name == "kv_heads")
                raise ShardingError(
                    f"{size} {name} do not divide into parallel.{axis}={parts}. Take "
                    f"parallel.{axis} of {fits}, or a model with {-(-size // parts) * parts} "
                    f"{name}{or_heads}."
                )
    return split_named(shape, dims, rules, sizes)


def axes_of(spec: P, dim: int) -> tuple[str, ...]:
    """Return the axes of a dim."""
    entry = spec[dim] if dim < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spec(taken: Sequence[Sequence[str]]) -> P:
    """Return the shortest spec that splits each dim over its axes."""
    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in taken]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
