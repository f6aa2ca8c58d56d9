"""Rows over a long row of tokens: windows, and documents packed with little padding."""

import functools
from typing import Any

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_arrays, fingerprint_tokens
from jtrain.data.text.token_files import TokenRange
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


class Windows:
    """`tokens` (int32, b t+1) and `length` (int32, b: how many of the t targets are real).

    A window starts at every `stride`-th token. For training use stride 1, the default: a row may
    start at any place of the text. For evaluation use `stride=context`: every token but the first
    is a target exactly once. The last window may be short: behind its `length` it repeats the last
    token. From a memory-mapped array and from a folder (`TokenFiles`) only the windows that are
    requested are read.

    Raises:
        DataError: a context or a stride that does not fit the tokens.
    """

    @plain_numbers
    def __init__(
        self, tokens: np.ndarray | TokenRange, *, context: int, stride: int = 1
    ):  # tokens: n
        longest = len(tokens) - 1  # a window has one token more than targets
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"Windows need one row of whole numbers; these tokens are {tokens.dtype} of shape "
                f"{tokens.shape}. Flatten them: tokens.ravel().astype('uint16')."
            )
        if not 1 <= context <= longest:
            fitting = f"Set context={min(max(context, 1), longest)}, or give" * (longest > 0)
            raise DataError(
                f"context {context} does not fit {len(tokens)} tokens, where the longest is "
                f"{max(longest, 0)}. {fitting or 'Give'} more text, or hold out another share."
            )
        if not 1 <= stride <= context:
            raise DataError(
                f"stride {stride} is not in 1 .. {context} (the context): windows would "
                f"{'skip tokens' if stride > context else 'never move'}. Set stride={context} to "
                f"use each target once, or stride=1 to start a window at every token."
            )
        self.tokens, self.context, self.stride = tokens, context, stride
        if isinstance(tokens, TokenRange):
            self._rows = lambda starts: tokens.gather(starts, context + 1)
        else:
            self._rows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1).__getitem__
        self._length = 1 + -(-(longest - context) // stride)

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        # Its own arguments, as pickling a view of the tokens would copy them.
        again = functools.partial(Windows, context=self.context, stride=self.stride)
        return again, (self.tokens,)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        starts = indices * self.stride
        last = len(self.tokens) - 1 - self.context
        rows = self._rows(np.minimum(starts, last)).astype(np.int32)
        length = np.minimum(self.context, len(self.tokens) - 1 - starts).astype(np.int32)
        for short in np.flatnonzero(starts > last):  # no window, or the last one
            rest = self.tokens[starts[short] :]
            rows[short] = rest[-1]
            rows[short, : len(rest)] = rest
        return {"tokens": rows, "length": length}

    def fingerprint(self) -> str:
        """Return the fingerprint of the tokens."""
        return fingerprint_tokens(self.tokens)


class Packed:
    """`tokens` (int32, b t+1), `segments` (int32, b t+1) and `length` (int32, b).

    A document that fits is in one row. A longer document is cut into pieces, and each piece but the
    first begins with the last token of the piece before. So in one pass over the rows every token
    but the first of a document is a target exactly once, and no target belongs to another document
    than its input. `segments` counts the pieces of a row from 1 and is 0 for padding: attention
    masks by it, and a loss takes only targets in the segment of their input. `length` counts the
    targets up to the last token that is not padding.

    The content of each row is fixed; `Shuffled` gives each epoch an order of rows.

    Args:
        tokens: a folder (`TokenFiles` or a range of it), or an array, n.
        context: targets a row, t.
        documents: the starts of the documents and the total length (n + 1), for an array.

    Raises:
        DataError: no tokens, or a context that is not positive.
    """

    @plain_numbers
    def __init__(
        self, tokens: np.ndarray | TokenRange, *, context: int, documents: np.ndarray | None = None
    ):
        if context < 1:
            raise DataError(f"context {context} has no target. Set context=1 or more.")
        if not len(tokens):
            raise DataError("0 tokens cannot be packed. Give a text that has some.")
        if documents is None:
            documents = (
                tokens.documents() if isinstance(tokens, TokenRange) else np.array([0, len(tokens)])
            )
        _check_documents(documents, len(tokens))
        self.tokens, self.context = tokens, context
        self._starts, self._lengths = _pieces(np.asarray(documents, np.int64), context)
        self._order, self._begins = pack_best_fit(self._lengths, context + 1)

    def __len__(self) -> int:
        return len(self._begins) - 1

    @property
    def filled(self) -> float:
        """Share of the places in the rows that hold a token; the rest is padding."""
        return int(self._lengths.sum()) / (len(self) * (self.context + 1))

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        begins, ends = self._begins[indices], self._begins[indices + 1]
        counts = ends - begins  # pieces a row
        pieces = self._order[_ranges(begins, counts)]
        starts, lengths = self._starts[pieces], self._lengths[pieces]
        filled = np.add.reduceat(lengths, np.cumsum(counts) - counts)  # tokens a row
        place = _ranges(np.arange(len(indices)) * (self.context + 1), filled)
        tokens = np.zeros((len(indices), self.context + 1), np.int32)
        segments = np.zeros_like(tokens)
        tokens.flat[place] = self._gather(_ranges(starts, lengths))
        segments.flat[place] = np.repeat(_ranges(np.ones_like(counts), counts), lengths)
        return {"tokens": tokens, "segments": segments, "length": (filled - 1).astype(np.int32)}

    def fingerprint(self) -> str:
        """Return the fingerprint of the tokens and of the ends of the documents."""
        return (
            f"{fingerprint_tokens(self.tokens)} "
            f"{fingerprint_arrays(len(self), {'': self._lengths})}"
        )

    def _gather(self, places: np.ndarray) -> np.ndarray:
        if isinstance(self.tokens, TokenRange):
            return self.tokens.gather(places, 1)[:, 0]
        return self.tokens[places]


def _pieces(documents: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece starts and its tokens, both int64, in the order of the text."""
    lengths = np.diff(documents)
    counts = np.maximum(1, -(-(lengths - 1) // context))
    counts[lengths == 0] = 0
    starts = np.repeat(documents[:-1], counts)
    starts += context * _ranges(np.zeros_like(counts), counts)
    return starts, np.minimum(context + 1, np.repeat(documents[1:], counts) - starts)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges `starts[i], starts[i] + 1, ...` of `counts[i]` numbers."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)


def _check_documents(documents: np.ndarray, tokens: int) -> None:
    edges = np.asarray(documents)
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != tokens or (np.diff(edges) < 0).any():
        raise DataError(
            f"`documents` should hold the start of each document, from 0 up, and end with the "
            f"number of tokens, {tokens}; it is {np.array2string(edges, threshold=6)}. Sum the "
            f"lengths: documents=np.cumsum([0, *lengths])."
        )


def pack_best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack each of n lengths, in 1 .. capacity, into one row; deterministic, by length alone.

    Return the numbers of the lengths by row (int64, n), and where each row begins among them
    (int64, rows + 1).

    The longest length goes first, each into the row where it leaves the least room, or else into a
    new row. Rows with equal room are filled at once: a million lengths take a fifth of a second.

    Source: Ding et al. 2024, Fewer truncations improve language modeling, arXiv 2404.10830; best
    fit decreasing needs at most 11/9 of the best number of rows and one more (Johnson 1973).
    """
    assert len(lengths) == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    # 16 bits are sorted 10 times faster.
    shortfall = (capacity - lengths).astype(np.min_scalar_type(capacity))
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
    return pieces, begins


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
