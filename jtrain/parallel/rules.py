"""Which mesh axes the named dims of arrays are split over: the one table of it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.sharding import PartitionSpec as P

from jtrain.core.types import Dims
from jtrain.errors import ShardingError

Sizes: TypeAlias = Mapping[str, int]  # of the axes of a mesh; an axis it lacks has size 1

# Outermost first: devices that are next to each other in the last axes have the fastest links.
AXES = ("slice", "stage", "data", "fsdp", "expert", "context", "tensor")
# The axes that the rows of a batch are split over: stages, too, outside of the layers, where they
# have nothing else to do.
ROWS = ("stage", "slice", "data", "fsdp", "expert")
SPLIT = "fsdp"  # the axis whose devices are there to split the state
SPLITS = (SPLIT, "context", "expert")  # and those that split it, too, where it would be the same

# Earlier names choose first; an axis is taken once.
STATE: Mapping[str, tuple[str, ...]] = {
    "layers": ("stage",),
    "experts": ("expert",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "hidden": ("tensor",),
    "vocab": ("tensor",),
    "width": (SPLIT,),
}
UNEVEN = {"heads", "kv_heads", "experts", "stages"}  # whole things: a part of one is of no use


def activations(
    *, split: bool = True, sequence: bool = False, copies: tuple[str, ...] = ()
) -> Mapping[str, tuple[str, ...]]:
    """Those of activations.

    Args:
        split: whether gradients are split over `fsdp`. Then `split` is a dim of something that
            is split like them (what was looked up in them, the sum of their gradient), and `group`
            the rows of all devices that have a part of it.
        sequence: whether `time` is split over `tensor`, too, where no other dim is.
        copies: axes whose devices have each a copy of the layers of a pipeline, with a dim of that
            name; `batch` is what is left of the rows inside.
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
    """The axes whose devices have all of the gradient until it is summed over them, by `zero`.

    With `gather` "step" those of `fsdp` do whatever is split between steps. Not `expert`, whose
    devices exchange tokens, though they have, too.
    """
    split = zero > 1 and gather == "turn"
    return ("slice", "data") if split else ("slice", "data", SPLIT)


class DimSplit(NamedTuple):
    """How an array is split, and why so."""

    spec: P = P()
    rules: tuple[str, ...] = ()  # what split it, such as `width -> fsdp`
    left: tuple[str, ...] = ()  # why dims that have a rule were left whole

    @property
    def rule(self) -> str:
        """What split it, in words; empty if nothing did."""
        return ", ".join(self.rules)

    @property
    def whole(self) -> str:
        """Why it was left whole, in words; empty if it was not."""
        return ", ".join(self.left)


def split_named(shape: Sequence[int], dims: Dims, rules: Mapping, sizes: Sizes) -> DimSplit:
    """An array whose dims have names, each split over the axes that its rule names and fit."""
    taken: list[list[str]] = [[] for _ in shape]
    said, left, used = [], [], set()
    for name, axes in rules.items():
        for dim in (i for i, d in enumerate(dims) if d == name):
            for axis in axes:
                if sizes.get(axis, 1) == 1 or axis in used:
                    continue
                parts = math.prod(sizes[a] for a in taken[dim]) * sizes[axis]
                if shape[dim] % parts:
                    left.append(f"{name} {shape[dim]} is no multiple of {axis} {parts}")
                    continue
                taken[dim].append(axis)
                used.add(axis)
            if taken[dim]:
                said.append(f"{name} -> {' x '.join(taken[dim])}")
    return DimSplit(spec(taken), tuple(said), tuple(left))


def split_largest(shape: Sequence[int], choice: DimSplit, axis: str, sizes: Sizes) -> DimSplit:
    """The same array with its largest dim split over one more axis, if it divides one."""
    taken = [list(axes_of(choice.spec, dim)) for dim in range(len(shape))]
    here = lambda dim: shape[dim] // math.prod(sizes[a] for a in taken[dim])
    fits = [dim for dim in range(len(shape)) if here(dim) and here(dim) % sizes[axis] == 0]
    if not fits:
        why = f"no dim of {list(shape)} is a multiple of {axis} {sizes[axis]}"
        return choice._replace(left=(*choice.left, why))
    dim = max(fits, key=here)
    taken[dim].append(axis)
    rule = f"largest dim, {shape[dim]} -> {axis}"
    return DimSplit(spec(taken), (*choice.rules, rule), choice.left)


def split_evenly(shape: Sequence[int], dims: Dims, rules: Mapping, sizes: Sizes) -> DimSplit:
    """As `split_named`, heads, experts and stages into whole ones or not at all.

    Raises:
        ShardingError: with the axis that does not divide them, and the sizes that do.
    """
    for size, name in zip(shape, dims, strict=True):
        if name not in UNEVEN:
            continue
        for axis in rules[name]:
            parts = sizes.get(axis, 1)
            if size % parts:
                fits = ", ".join(str(n) for n in range(1, parts + 1) if size % n == 0)
                raise ShardingError(
                    f"{size} {name} do not divide into parallel.{axis}={parts}. Take "
                    f"parallel.{axis} of {fits}, or a model with {-(-size // parts) * parts} "
                    f"{name}."
                )
    return split_named(shape, dims, rules, sizes)


def axes_of(of: P, dim: int) -> tuple[str, ...]:
    """The axes that a dim is split over."""
    entry = of[dim] if dim < len(of) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spec(taken: Sequence[Sequence[str]]) -> P:
    """The spec that splits each dim over its axes, as short as can be."""
    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in taken]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
