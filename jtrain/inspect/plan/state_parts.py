"""Parts of a state on a device: parameters, frozen weights by their type, the optimizer's state."""

import math
from typing import Any, NamedTuple

from jtrain.core.pytree import named_leaves
from jtrain.parallel.offload import is_on_host
from jtrain.train.setup import TrainSetup

_PARTS = {"params": "parameters", "opt_state": "optimizer"}
_ORDER = ("parameters", "frozen", "optimizer", "other")
_FROZEN = "extra/base/"


class StatePart(NamedTuple):
    """Leaves of a state that belong together."""

    name: str  # parameters, frozen, optimizer or other
    kind: str  # type of frozen leaves: float32, bfloat16, int8 or nf4
    host: bool  # in the memory of the host between steps
    bytes: int  # of each device

    @property
    def note(self) -> str:
        """Type and place of the part, in words."""
        kind = f"in {self.kind}" if self.kind else ""
        return ", ".join(filter(None, [kind, "in host memory" if self.host else ""]))


def state_parts(setup: TrainSetup) -> tuple[StatePart, ...]:
    """Return the parts of a setup's state that have leaves, from shapes alone."""
    sums: dict[tuple[str, str, bool], int] = {}
    for name, leaf in named_leaves(setup.like).items():
        key = (*_part(name, leaf, setup), is_on_host(leaf))
        shape = leaf.sharding.shard_shape(leaf.shape)
        sums[key] = sums.get(key, 0) + math.prod(shape) * leaf.dtype.itemsize
    parts = [StatePart(*key, size) for key, size in sums.items()]
    return tuple(sorted(parts, key=lambda part: (_ORDER.index(part.name), -part.bytes)))


def _part(name: str, leaf: Any, setup: TrainSetup) -> tuple[str, str]:
    adapter = setup.experiment.adapter
    if adapter is None or not name.startswith(_FROZEN):
        return _PARTS.get(name.split("/")[0], "other"), ""
    owner, kind = name.removeprefix(_FROZEN).rsplit("/", 1)[0], adapter.settings.frozen
    stored = kind in ("int8", "nf4") and owner in adapter.leaves  # codes and scales of one leaf
    return "frozen", kind if stored else str(leaf.dtype)
