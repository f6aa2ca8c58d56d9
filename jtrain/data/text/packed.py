"""Packed rows: documents of any length in rows of one length, with little padding."""

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_arrays, fingerprint_tokens
from jtrain.data.text.packing import pack_best_fit
from jtrain.data.text.token_files import TokenRange
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


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
        self._rows = pack_best_fit(self._lengths, context + 1)

    def __len__(self) -> int:
        return len(self._rows.begins) - 1

    @property
    def filled(self) -> float:
        """Share of the places in the rows that hold a token; the rest is padding."""
        return int(self._lengths.sum()) / (len(self) * (self.context + 1))

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        begins, ends = self._rows.begins[indices], self._rows.begins[indices + 1]
        counts = ends - begins  # pieces a row
        pieces = self._rows.pieces[_ranges(begins, counts)]
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
