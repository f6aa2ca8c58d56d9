"""Which axes of a mesh a run makes use of, and what to type where it has none for one."""

from collections.abc import Iterable

from jtrain.core.types import Dims
from jtrain.errors import ShardingError
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.rules import STATE, DimSplit, Sizes, axes_of

# Dims that any model has: that an axis splits them says nothing.
OF_ROWS = ("rows", "batch", "group", "copies")
# Axes that split a dim only beside others, which they need: of no use by that alone.
BESIDE = {"time": {"tensor"}}
# What has a dim for it. The other axes split the rows, which every run has.
NEEDS = {
    "stage": "a model whose layers are stacked (model.scan=true of a transformer)",
    "expert": "a model with experts (model.experts of a transformer)",
    "context": "a model that names the dim `time` of what it computes, such as a transformer",
    "tensor": "a model that names heads, hidden or vocab, such as a transformer",
}


class AxisUsage:
    """What was split of the activations, and what was not, since a loss was traced."""

    def __init__(self):
        self.axes: set[str] = set()
        self.saved: list[str] = []  # names of what a model saves for its backward pass
        self.left: dict[str, None] = {}  # why dims were left whole, in order

    def note(self, choice: DimSplit, dims: Dims) -> None:
        """Remembers how an activation was split."""
        for dim, name in enumerate(dims):
            if name not in OF_ROWS:
                beside = BESIDE.get(name or "", set())
                self.axes.update(axis for axis in axes_of(choice.spec, dim) if axis not in beside)
        self.left.update(dict.fromkeys(choice.left))


def check_axes_used(sizes: Sizes, seen: AxisUsage, leaves: Iterable[LeafSharding]) -> None:
    """Checks that every axis splits some leaf, or some activation that was seen.

    Raises:
        ShardingError: with the axis that splits nothing, why dims were left whole, and what to
            type.
    """
    used, left = set(seen.axes), dict(seen.left)
    for of in leaves:
        used.update(axis for axes in of.axes for axis in axes)
        left.update(dict.fromkeys(of.choice.left))
    for axis, needs in NEEDS.items():
        size = sizes.get(axis, 1)
        if size == 1 or axis in used:
            continue
        names = [name for name, axes in STATE.items() if axis in axes] or ["time"]
        whole = [why for why in left if f" multiple of {axis} " in why][:3]
        why = "; ".join(whole) if whole else f"no dim is named {' or '.join(names)}"
        raise ShardingError(
            f"parallel.{axis}={size}, and no dim can use that axis: {why}. "
            f"Take parallel.{axis}=1 and give its devices to the rows (parallel.fsdp=0), or take "
            f"{needs}."
        )
