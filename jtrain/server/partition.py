"""Partitions of the parameters: rows of each leaf by server, and fragments of them by layer."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Params, Tree
from jtrain.errors import ConfigError

LAYERS = 3  # of a fragment by default, as in the paper


class Rows(NamedTuple):
    """Rows `start` .. `stop` of a leaf's first dim; a scalar is a row, and 0 where it is not."""

    start: int
    stop: int

    def of(self, leaf: Any) -> Any:
        """Return these rows of a leaf."""
        if np.ndim(leaf):
            return leaf[self.start : self.stop]
        return leaf if self else np.zeros_like(leaf)

    def __bool__(self) -> bool:
        return self.stop > self.start


@dataclasses.dataclass(frozen=True)
class Partition:
    """Rows of each parameter that each shard holds.

    Every shard has all leaves, some of them without rows, so that names, numbers of dims and tree
    are those of the whole: an optimizer that treats numbers one by one sees no difference.
    """

    shards: Sequence[Sequence[Rows]]
    """By shard, and by parameter in the order of the tree."""
    shapes: Mapping[str, tuple[int, ...]]
    """By the name of the parameter."""

    def of_params(self, params: Params, shard: int) -> Params:
        """Return the rows of a shard, of a tree of the parameters' structure."""
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(self.shards[shard], leaves, strict=True)
        return tree.unflatten([rows.of(leaf) for rows, leaf in pairs])

    def of_state(self, state: Tree, shard: int) -> Tree:
        """Return the rows of a shard, of any tree: leaves that belong to a parameter are split."""
        leaves, tree = jax.tree.flatten(state)
        pairs = zip(self._parameters(state), leaves, strict=True)
        return tree.unflatten(
            [leaf if i is None else self.shards[shard][i].of(leaf) for i, leaf in pairs]
        )

    def join(self, like: Any, shards: Sequence[Sequence[Any]]) -> Any:
        """Return a tree of the structure of `like`, on the host, from the leaves of each shard."""
        pairs = zip(self._parameters(like), zip(*shards, strict=True), strict=True)
        leaves = [np.asarray(parts[0]) if i is None else self._join(i, parts) for i, parts in pairs]
        return jax.tree.structure(like).unflatten(leaves)

    def _join(self, parameter: int, parts: Sequence[Any]) -> np.ndarray:
        """Return a leaf that belongs to a parameter from its rows in each shard."""
        rows = [shard[parameter] for shard in self.shards]
        filled = [np.asarray(part) for each, part in zip(rows, parts, strict=True) if each]
        if len(filled) == 1:
            return filled[0]
        return np.concatenate(filled) if filled else np.asarray(parts[0])

    def _parameters(self, state: Any) -> list[int | None]:
        """Return the parameter of each leaf: its name ends that of the leaf, in the same shape.

        None: a leaf of no parameter, such as a count, of which every shard has a copy.
        """
        numbers = {name: i for i, name in enumerate(self.shapes)}
        found = []
        for name, leaf in named_leaves(state).items():
            words = name.split("/")
            ends = ["/".join(words[i:]) for i in range(len(words))]
            fits = [end for end in ends if self.shapes.get(end) == np.shape(leaf)]
            found.append(numbers[fits[0]] if fits else None)
        return found


def make_partition(params: Params, shards: int) -> Partition:
    """Return the partition of the parameters (or their shapes) into shards of as many bytes.

    The leaves lie one after the other, and are cut into runs of equal length, at the nearest row.

    Raises:
        ConfigError: if a shard would have nothing.
    """
    named = named_leaves(params)

    def cut(shards: int) -> list[list[Rows]]:
        total = sum(map(_num_bytes, named.values()))
        cuts = [total * shard / shards for shard in range(shards + 1)]
        by_shard, offset = [[] for _ in range(shards)], 0
        for leaf in named.values():
            rows = _num_rows(leaf)
            each = max(_num_bytes(leaf) // max(rows, 1), 1)
            at = [min(max(round((cut - offset) / each), 0), rows) for cut in cuts]
            for shard, bounds in enumerate(itertools.pairwise(at)):
                by_shard[shard].append(Rows(*bounds))
            offset += _num_bytes(leaf)
        return by_shard

    found = cut(shards)
    if not all(map(any, found)):
        most = _largest(shards - 1, lambda count: all(map(any, cut(count))))
        rows = sum(map(_num_rows, named.values()))
        raise ConfigError(
            f"parallel.shards={shards}: the parameters have {len(named)} leaves of {rows} rows in "
            f"all, and some servers would hold none of them. Set parallel.shards={most}."
        )
    return Partition(found, {name: tuple(np.shape(leaf)) for name, leaf in named.items()})


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, or 1."""
    return next((count for count in range(most, 1, -1) if fits(count)), 1)


def _num_rows(leaf: Any) -> int:
    return np.shape(leaf)[0] if np.shape(leaf) else 1


def _num_bytes(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf), dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


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
    number = lambda name: next((int(word) for word in name.split("/") if word.isdecimal()), None)
    layer_of = {name: layer for name in named if (layer := number(name)) is not None}
    layers = sorted(set(layer_of.values()))

    def assign(count: int) -> dict[str, int]:
        assigned = {name: layers.index(layer) % count for name, layer in layer_of.items()}
        sizes = [0] * count
        for name, fragment in assigned.items():
            sizes[fragment] += _num_bytes(named[name])
        rest = [name for name in named if name not in assigned]
        for name in sorted(rest, key=lambda name: -_num_bytes(named[name])):
            assigned[name] = int(np.argmin(sizes))
            sizes[assigned[name]] += _num_bytes(named[name])
        return assigned

    fills = lambda count: len(set(assign(count).values())) == count
    count = fragments or max(1, -(-len(layers) // LAYERS))
    if count > 1 and not fills(count):
        raise ConfigError(
            f"parallel.mode.fragments={count}: the parameters have {len(named)} leaves in "
            f"{len(layers)} layers, and some fragments would have none. Set "
            f"parallel.mode.fragments={_largest(count - 1, fills)}."
        )
    assigned = assign(count)
    return [assigned[name] for name in named]


def split_fragments(partition: Partition, assigned: Sequence[int]) -> Partition:
    """Return the partition whose part `fragment x shards + shard` is a shard's of a fragment."""
    parts = [
        [rows if own == fragment else Rows(0, 0) for rows, own in zip(shard, assigned, strict=True)]
        for fragment in range(max(assigned, default=0) + 1)
        for shard in partition.shards
    ]
    return dataclasses.replace(partition, shards=parts)


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
