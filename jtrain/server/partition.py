"""Partition of a state over shards: rows of each leaf, so that all hold as many bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtrain.core.pytree import named_leaves
from jtrain.core.types import Params, Tree
from jtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows `start` .. `stop` of a leaf's first dim; a scalar is a row, and 0 where it is not."""

    start: int
    stop: int
    scalar: bool = False

    def of(self, leaf: Any) -> Any:
        """Return these rows of a leaf."""
        if self.scalar:
            return leaf if self.stop > self.start else np.zeros_like(leaf)
        return leaf[self.start : self.stop]


class Whole(Rows):
    """A leaf that belongs to no parameter, such as a count: every shard has a copy."""

    def of(self, leaf: Any) -> Any:
        """Return the leaf."""
        return leaf


@dataclasses.dataclass(frozen=True)
class Partition:
    """Rows of each parameter that each shard holds.

    Every shard has all leaves, some of them without rows, so that names, numbers of dims and tree
    are those of the whole: an optimizer that treats numbers one by one sees no difference.
    """

    shards: Sequence[Sequence[Rows]]
    """By shard, and by parameter in the order of the tree."""
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]

    def of_params(self, params: Params, shard: int) -> Params:
        """Return the rows of a shard, of a tree of the parameters' structure."""
        leaves, tree = jax.tree.flatten(params)
        rows = self.shards[shard]
        return tree.unflatten([r.of(leaf) for r, leaf in zip(rows, leaves, strict=True)])

    def of_state(self, state: Tree, shard: int) -> Tree:
        """Return the rows of a shard, of any tree: leaves that belong to a parameter are split."""
        rows = self._rows_of_state(state, shard)
        leaves, tree = jax.tree.flatten(state)
        return tree.unflatten([r.of(leaf) for r, leaf in zip(rows, leaves, strict=True)])

    def join(self, like: Any, shards: Sequence[Sequence[Any]]) -> Any:
        """Return a tree of the structure of `like`, on the host, from the leaves of each shard."""
        rows = [self._rows_of_state(like, shard) for shard in range(len(shards))]
        tree = jax.tree.structure(like)
        return tree.unflatten(
            [
                _join([each[i] for each in rows], parts)
                for i, parts in enumerate(zip(*shards, strict=True))
            ]
        )

    def num_bytes(self, params: Params, shard: int) -> int:
        """Return the bytes of the parameters of a shard."""
        mine = zip(self.shards[shard], jax.tree.leaves(params), strict=True)
        return sum(_bytes_per_row(leaf) * (rows.stop - rows.start) for rows, leaf in mine)

    def _rows_of_state(self, state: Any, shard: int) -> list[Rows]:
        mine = dict(zip(self.names, zip(self.shapes, self.shards[shard], strict=True), strict=True))
        return [
            _rows_of_leaf(name, np.shape(leaf), mine) for name, leaf in named_leaves(state).items()
        ]


def make_partition(params: Params, shards: int) -> Partition:
    """Return the partition of the parameters (or their shapes) into shards of as many bytes.

    The leaves lie one after the other, and are cut into runs of equal length, at the nearest row.

    Raises:
        ConfigError: if a shard would have nothing.
    """
    named = named_leaves(params)
    sizes = [_bytes_per_row(leaf) * _num_rows(leaf) for leaf in named.values()]
    total = sum(sizes)
    cuts = [total * shard / shards for shard in range(shards + 1)]
    by_shard: list[list[Rows]] = [[] for _ in range(shards)]
    offset = 0
    for leaf, size in zip(named.values(), sizes, strict=True):
        rows, each = _num_rows(leaf), max(_bytes_per_row(leaf), 1)
        at = [min(max(round((cut - offset) / each), 0), rows) for cut in cuts]
        for shard in range(shards):
            scalar = not np.shape(leaf)
            by_shard[shard].append(Rows(at[shard], at[shard + 1], scalar))
        offset += size
    filled = _num_filled(by_shard)
    if filled < shards:
        rows = sum(map(_num_rows, named.values()))
        most = next(n for n in range(filled, 0, -1) if n == 1 or _fills(params, n))
        raise ConfigError(
            f"parallel.shards={shards}: the parameters have {len(named)} leaves of {rows} rows in "
            f"all, and some servers would hold none of them. Set parallel.shards={most}."
        )
    shapes = [tuple(np.shape(leaf)) for leaf in named.values()]
    return Partition(by_shard, list(named), shapes)


def _num_filled(by_shard: Sequence[Sequence[Rows]]) -> int:
    return sum(any(rows.stop > rows.start for rows in shard) for shard in by_shard)


def _fills(params: Params, shards: int) -> bool:
    try:
        make_partition(params, shards)
    except ConfigError:
        return False
    return True


def _join(rows: Sequence[Rows], parts: Sequence[Any]) -> np.ndarray:
    """Return a leaf from its rows in each shard."""
    if isinstance(rows[0], Whole):
        return np.asarray(parts[0])
    if rows[0].scalar:
        return np.asarray(next(p for r, p in zip(rows, parts, strict=True) if r.stop > r.start))
    filled = [np.asarray(part) for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else np.concatenate(filled or [np.asarray(parts[0])])


def _num_rows(leaf: Any) -> int:
    return np.shape(leaf)[0] if np.shape(leaf) else 1


def _bytes_per_row(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf)[1:], dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


def _rows_of_leaf(
    name: str, shape: tuple[int, ...], mine: dict[str, tuple[tuple[int, ...], Rows]]
) -> Rows:
    """Return the rows of the parameter whose name ends that of the leaf, if the shapes agree."""
    parts = name.split("/")
    for i in range(len(parts)):
        found = mine.get("/".join(parts[i:]))
        if found is not None and found[0] == shape:
            return found[1]
    return Whole(0, 1)  # a count: every shard has its own
