"""Usage of mesh axes by a run, and the error for an axis that nothing uses."""

from collections.abc import Iterable

from jtrain.core.types import Dims
from jtrain.errors import ShardingError
from jtrain.parallel.leaf_sharding import LeafSharding
from jtrain.parallel.rules import STATE, DimSplit, Sizes, axes_of

# Dims of any model, which do not count as usage of an axis.
OF_ROWS = ("rows", "batch", "group", "copies")
# Axes that split a dim only together with another axis, which does not count as usage.
BESIDE = {"time": {"tensor"}}
# Models with a dim for each axis. The other axes split the rows, which every run has.
NEEDS = {
    "stage": "a model whose layers are stacked (model.scan=true of a transformer)",
    "expert": "a model with experts (model.experts of a transformer)",
    "context": "a model that names the dim `time` of what it computes, such as a transformer",
    "tensor": "a model that names heads, hidden or vocab, such as a transformer",
}


class AxisUsage:
    """Record of split and unsplit activations since a loss was traced."""

    def __init__(self):
        self.axes: set[str] = set()
        self.saved: list[str] = []  # names of saved activations
        self.left: dict[str, None] = {}  # reasons why dims are unsharded, in order

    def note(self, choice: DimSplit, dims: Dims) -> None:
        """Record the split of an activation."""
        for dim, name in enumerate(dims):
            if name not in OF_ROWS:
                beside = BESIDE.get(name or "", set())
                self.axes.update(axis for axis in axes_of(choice.spec, dim) if axis not in beside)
        self.left.update(dict.fromkeys(choice.left))


def check_axes_used(sizes: Sizes, usage: AxisUsage, leaves: Iterable[LeafSharding]) -> None:
    """Raise unless every axis splits a leaf or a recorded activation.

    Raises:
        ShardingError: with the unused axis, why dims are unsharded, and the settings to change.
    """
    used, left = set(usage.axes), dict(usage.left)
    for leaf in leaves:
        used.update(axis for axes in leaf.axes for axis in axes)
        left.update(dict.fromkeys(leaf.choice.left))
    for axis, needs in NEEDS.items():
        size = sizes.get(axis, 1)
        if size == 1 or axis in used:
            continue
        names = [name for name, axes in STATE.items() if axis in axes] or ["time"]
        reasons = [why for why in left if f" multiple of {axis} " in why][:3]
        why = "; ".join(reasons) if reasons else f"no dim is named {' or '.join(names)}"
        raise ShardingError(
            f"parallel.{axis}={size}, and no dim can use that axis: {why}. "
            f"Take parallel.{axis}=1 and give its devices to the rows (parallel.fsdp=0), or take "
            f"{needs}."
        )
