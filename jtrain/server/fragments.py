"""Fragments of the parameters, each of which streaming DiLoCo synchronizes at a time of its own."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Params
from jtrain.errors import ConfigError
from jtrain.server.partition import Partition, Rows

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


class StreamingRound(NamedTuple):
    """Steps of all workers that end with a push, or where the run reads the state."""

    first: int
    last: int
    pushes: tuple[int, ...]
    """Fragments that are pushed after the last step."""
    merge: int | None
    """Fragment, pushed earlier, that is pulled and merged in this round."""
    merge_before: int
    """Step before which it is."""
    pushed_at: int
    """Step after which it was pushed."""


@dataclasses.dataclass(frozen=True)
class FragmentSchedule:
    """Times at which fragments are pushed and merged, as functions of the step.

    Fragment p of P is pushed after steps H (p + 1) / P, rounded down, of each H. It is merged
    `overlap` steps later. After the last step of the run every fragment is pushed.
    """

    inner_steps: int
    fragments: int
    overlap: int
    stop: int
    """The last step of the run."""

    @property
    def shortest(self) -> int:
        """Fewest steps between two pushes."""
        ends = [0, *self._offsets]
        return min(b - a for a, b in itertools.pairwise(ends))

    def round_after(self, done: int, limit: int) -> StreamingRound:
        """Return the round that begins after step `done` and ends at `limit` at the latest."""
        first, (boundary, fragment) = done + 1, self._next_push(done)
        last = min(boundary, limit)
        before = self._last_push(done)
        merge, merge_before, pushed_at = None, 0, 0
        waiting = set()  # pushed, and not merged
        if before is not None:
            merge_before, pushed_at = before[0] + self.overlap + 1, before[0]
            if first <= merge_before <= last:
                merge = before[1]
            elif merge_before > last:
                waiting.add(before[1])
        pushes = (fragment,) if last == boundary else ()
        if last == self.stop:  # what workers have learned since is in no server yet
            pushes = tuple(p for p in range(self.fragments) if p in pushes or p not in waiting)
        return StreamingRound(first, last, pushes, merge, merge_before, pushed_at)

    @property
    def _offsets(self) -> list[int]:
        return [self.inner_steps * (p + 1) // self.fragments for p in range(self.fragments)]

    def _next_push(self, done: int) -> tuple[int, int]:
        """Return the step of the first push after `done`, and its fragment."""
        period = done // self.inner_steps * self.inner_steps
        return min(
            (start + offset, fragment)
            for start in (period, period + self.inner_steps)
            for fragment, offset in enumerate(self._offsets)
            if start + offset > done
        )

    def _last_push(self, done: int) -> tuple[int, int] | None:
        """Return the step of the last push up to `done`, and its fragment."""
        period = done // self.inner_steps * self.inner_steps
        found = [
            (start + offset, fragment)
            for start in (period - self.inner_steps, period)
            for fragment, offset in enumerate(self._offsets)
            if 0 < start + offset <= done
        ]
        return max(found, default=None)
