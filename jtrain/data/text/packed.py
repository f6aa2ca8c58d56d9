"""Documents of any length, packed into rows of one length: no token is padding that need not be."""

import numpy as np

from jtrain.data.batches.fingerprint import of_arrays, of_tokens
from jtrain.data.text.packing import best_fit
from jtrain.data.text.token_files import TokenRange
from jtrain.errors import DataError


class Packed:
    """`tokens` (int32, b t+1), `segments` (int32, b t+1) and `length` (int32, b).

    A document that fits lies in a row whole. A longer one is cut, each part but the first beginning
    with the token that the one before ended with. So in one pass over the rows every token but the
    first of a document is a target exactly once, and none is a target across two documents.
    `segments` counts the parts of a row from 1 and is 0 behind them; attention that is given it
    sees only its own part, and a loss has only targets of the same part as their input. `length`
    counts the targets up to the last token that is no padding.

    Which row has what is fixed; `Shuffled` gives each epoch an order of rows.

    Args:
        tokens: of a folder (`TokenFiles` or a part of it), or an array, n.
        context: targets a row, t.
        documents: where documents begin and the length of all (n + 1), for an array.

    Raises:
        DataError: no tokens, or a context that is not positive.
    """

    def __init__(
        self, tokens: np.ndarray | TokenRange, *, context: int, documents: np.ndarray | None = None
    ):
        if context < 1:
            raise DataError(f"context {context} has no target. Set context=1 or more.")
        if not len(tokens):
            raise DataError("0 tokens were to be packed. Give a text that has some.")
        if documents is None:
            documents = (
                tokens.documents() if isinstance(tokens, TokenRange) else np.array([0, len(tokens)])
            )
        _refuse(documents, len(tokens))
        self.tokens, self.context = tokens, context
        self._starts, self._lengths = _pieces(np.asarray(documents, np.int64), context)
        self._rows = best_fit(self._lengths, context + 1)

    def __len__(self) -> int:
        return len(self._rows.begins) - 1

    @property
    def filled(self) -> float:
        """The share of the places in the rows that a token has; the rest is padding."""
        return int(self._lengths.sum()) / (len(self) * (self.context + 1))

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        begins, ends = self._rows.begins[indices], self._rows.begins[indices + 1]
        counts = ends - begins  # pieces a row
        pieces = self._rows.pieces[_ranges(begins, counts)]
        starts, lengths = self._starts[pieces], self._lengths[pieces]
        used = np.add.reduceat(lengths, np.cumsum(counts) - counts)  # tokens a row
        place = _ranges(np.arange(len(indices)) * (self.context + 1), used)
        tokens = np.zeros((len(indices), self.context + 1), np.int32)
        segments = np.zeros_like(tokens)
        tokens.flat[place] = self._take(_ranges(starts, lengths))
        segments.flat[place] = np.repeat(_ranges(np.ones_like(counts), counts), lengths)
        return {"tokens": tokens, "segments": segments, "length": (used - 1).astype(np.int32)}

    def fingerprint(self) -> str:
        """What the data is, in a line; where its documents end, too."""
        return f"{of_tokens(self.tokens)} {of_arrays(len(self), {'': self._lengths})}"

    def _take(self, places: np.ndarray) -> np.ndarray:
        if isinstance(self.tokens, TokenRange):
            return self.tokens.gather(places, 1)[:, 0]
        return self.tokens[places]


def _pieces(documents: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each piece starts and its tokens, both int64, in the order of the text."""
    lengths = np.diff(documents)
    counts = np.maximum(1, -(-(lengths - 1) // context))
    counts[lengths == 0] = 0
    starts = np.repeat(documents[:-1], counts)
    starts += context * _ranges(np.zeros_like(counts), counts)
    return starts, np.minimum(context + 1, np.repeat(documents[1:], counts) - starts)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`starts[i], starts[i] + 1, ...`, `counts[i]` of them, one after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)


def _refuse(documents: np.ndarray, tokens: int) -> None:
    edges = np.asarray(documents)
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != tokens or (np.diff(edges) < 0).any():
        raise DataError(
            f"`documents` was to say where each begins, from 0 up, and end with the {tokens} "
            f"tokens; it is {np.array2string(edges, threshold=6)}. Count the lengths up: "
            f"documents=np.cumsum([0, *lengths])."
        )
