"""Fragments of the parameters, each of which streaming DiLoCo synchronizes at a time of its own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Params
from jtrain.errors import ConfigError
from jtrain.server.shards.partition import Partition, Rows

LAYERS = 3  # of a fragment by default, as in the paper


def assign_fragments(params: Params, fragments: int) -> list[int]:
    """Return the fragment of each leaf, in the order of the tree.

    Layers are the numbers in the names of leaves, `blocks/7/up/kernel`; layer i belongs to fragment
    i modulo their number, the strided pattern of Douillard et al. 2025
    (https://arxiv.org/abs/2501.18512). Leaves of no layer go one after the other, the largest
    first, to the fragment that has the fewest bytes.

    Args:
        fragments: number of them; 0: one for every three layers.

    Raises:
        ConfigError: if a fragment would have no leaf.
    """
    named = named_leaves(params)
    layers = sorted({layer for name in named if (layer := _layer(name)) is not None})
    count = fragments or max(1, -(-len(layers) // LAYERS))
    assigned = _assign(named, layers, count)
    filled = len(set(assigned.values()))
    if filled < count:
        most = next(
            n for n in range(filled, 0, -1) if len({*_assign(named, layers, n).values()}) == n
        )
        raise ConfigError(
            f"parallel.mode.fragments={count}: the parameters have {len(named)} leaves in "
            f"{len(layers)} layers, and some fragments would have none. Set "
            f"parallel.mode.fragments={most}."
        )
    return [assigned[name] for name in named]


def split_fragments(partition: Partition, assigned: Sequence[int]) -> Partition:
    """Return the partition whose part `fragment x shards + shard` is a shard's of a fragment."""
    parts = []
    for fragment in range(max(assigned) + 1):
        for rows in partition.shards:
            mine = [
                each if other == fragment else Rows(0, 0, each.scalar)
                for each, other in zip(rows, assigned, strict=True)
            ]
            parts.append(mine)
    return dataclasses.replace(partition, shards=parts)


def _assign(named: Mapping[str, Any], layers: Sequence[int], count: int) -> dict[str, int]:
    place = {layer: i % count for i, layer in enumerate(layers)}
    sizes, assigned = [0] * count, {}
    rest = []
    for name, leaf in named.items():
        layer = _layer(name)
        if layer is None:
            rest.append(name)
        else:
            assigned[name] = place[layer]
            sizes[place[layer]] += _num_bytes(leaf)
    for name in sorted(rest, key=lambda name: -_num_bytes(named[name])):
        assigned[name] = int(np.argmin(sizes))
        sizes[assigned[name]] += _num_bytes(named[name])
    return assigned


def _layer(name: str) -> int | None:
    """Return the first number in the path of a leaf."""
    return next((int(word) for word in name.split("/") if word.isdecimal()), None)


def _num_bytes(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf), dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
