"""Best-fit packing of lengths into rows of fixed capacity, longest first."""

from typing import NamedTuple

import numpy as np


class PackedRows(NamedTuple):
    """Pieces by row: row i has `pieces[begins[i] : begins[i + 1]]`."""

    pieces: np.ndarray  # int64, n: the numbers of the lengths
    begins: np.ndarray  # int64, rows + 1


def pack_best_fit(lengths: np.ndarray, capacity: int) -> PackedRows:  # lengths: n, in 1 .. capacity
    """Pack each length into one row of `capacity`; deterministic, by length alone.

    The longest length goes first, each into the row where it leaves the least room, or else into a
    new row. Rows with equal room are filled at once: a million lengths take a fifth of a second.

    Source: Ding et al. 2024, Fewer truncations improve language modeling, arXiv 2404.10830; best
    fit decreasing needs at most 11/9 of the best number of rows and one more (Johnson 1973).
    """
    assert len(lengths) == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    shortfall = (capacity - lengths).astype(
        np.min_scalar_type(capacity)
    )  # 16 bits sort 10 times faster
    longest_first = np.argsort(shortfall, kind="stable")
    by_length = np.bincount(lengths, minlength=1)
    distinct = np.flatnonzero(by_length)[::-1]
    row_of, rows = np.empty(len(lengths), np.int64), 0
    room: dict[int, list[np.ndarray]] = {}  # rows by the room that is left in them, at least 1
    first = 0
    for length, count in zip(distinct.tolist(), by_length[distinct].tolist(), strict=True):
        waiting = longest_first[first : first + count]
        first += count
        for space in sorted(space for space in room if space >= length):
            if not len(waiting):
                break
            each = space // length
            rows_with_space = np.concatenate(room.pop(space))
            needed = -(-len(waiting) // each)
            filled, leftover = rows_with_space[:needed], rows_with_space[needed:]
            if len(leftover):
                room[space] = [leftover]
            waiting = _fill(waiting, filled, each, space, length, row_of, room)
        if len(waiting):
            each = capacity // length
            new = np.arange(rows, rows + -(-len(waiting) // each))
            rows += len(new)
            _fill(waiting, new, each, capacity, length, row_of, room)
    pieces = np.argsort(row_of, kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return PackedRows(pieces, begins)


def _fill(
    waiting: np.ndarray,
    rows: np.ndarray,
    each: int,
    space: int,
    length: int,
    row_of: np.ndarray,
    room: dict[int, list[np.ndarray]],
) -> np.ndarray:
    """Put `each` of the waiting pieces into every one of `rows`; return those still waiting."""
    placed = waiting[: len(rows) * each]
    row_of[placed] = np.repeat(rows, each)[: len(placed)]
    rest = len(placed) % each  # the last row may have room for more
    full = rows[:-1] if rest else rows
    for group, used in ((full, each), (rows[-1:], rest)):
        leftover = space - used * length
        if used and leftover and len(group):
            room.setdefault(leftover, []).append(group)
    return waiting[len(placed) :]
