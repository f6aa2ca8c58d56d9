"""Interleaving of several sources or streams, one row of each in turn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrain.data.batches.fingerprint import Fingerprinted, fingerprint
from jtrain.data.batches.stream import Stream
from jtrain.data.sources.source import Source
from jtrain.errors import DataError


class Interleaved:
    """The rows of several sources in turn: the first of each, the second of each, and so on.

    A source without rows left is passed over. `InOrder` reads in this order, so reading is spread
    over all disks if the files are on several; `Shuffled` draws from all sources in any case.

    Raises:
        DataError: if no source has a row.
    """

    def __init__(self, sources: Sequence[Source]):
        self.parts = list(sources)
        lengths = np.array([len(part) for part in self.parts], np.int64)
        if not lengths.sum():
            raise DataError(
                f"{len(self.parts)} sources should be read in turn, and none has a row. Give at "
                f"least one with rows."
            )
        # A phase is a range of rounds in which the same sources, `_active`, still have rows.
        ends = np.unique(lengths[lengths > 0])
        begins = np.concatenate([[0], ends[:-1]])
        self._active = [np.flatnonzero(lengths > begin) for begin in begins]
        self._begins = begins
        counts = (ends - begins) * np.array([len(active) for active in self._active])
        self._first = np.concatenate([[0], np.cumsum(counts)])  # row of each phase, and the length

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        source_of, rows = self._places(indices)
        batch: dict[str, np.ndarray] = {}
        for number in np.unique(source_of).tolist():
            chosen = np.flatnonzero(source_of == number)
            for name, array in self.parts[number][rows[chosen]].items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *array.shape[1:]), array.dtype)
                if batch[name].shape[1:] != array.shape[1:] or batch[name].dtype != array.dtype:
                    raise DataError(
                        f"Rows of a batch need one type and shape, and `{name}` of source {number} "
                        f"is {array.dtype} {array.shape[1:]} where it was {batch[name].dtype} "
                        f"{batch[name].shape[1:]} before. Write them with one type and shape."
                    )
                batch[name][chosen] = array
        return batch

    def fingerprint(self) -> str:
        """Return the fingerprints of all sources; empty if one has none."""
        lines = [fingerprint(part) for part in self.parts]
        return f"in turn: {'; '.join(lines)}" if all(lines) else ""

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # each int64, b
        """Return the source of each row, and its row in that source."""
        source_of, rows = np.empty_like(indices), np.empty_like(indices)
        phases = np.searchsorted(self._first, indices, "right") - 1
        for phase in np.unique(phases).tolist():
            chosen, active = np.flatnonzero(phases == phase), self._active[phase]
            rounds, turn = np.divmod(indices[chosen] - self._first[phase], len(active))
            source_of[chosen], rows[chosen] = active[turn], self._begins[phase] + rounds
        return source_of, rows


class InterleavedStream:
    """A stream that takes one item from each of several streams in turn.

    All streams are endless, so each gives an equal share however long its files are; the state is
    that of all streams, and whose turn it is.
    """

    def __init__(self, streams: Sequence[Stream]):
        self._streams, self._turn = list(streams), 0

    def next(self) -> Any:
        """Return the next item."""
        item = self._streams[self._turn].next()
        self._turn = (self._turn + 1) % len(self._streams)
        return item

    def state(self) -> dict[str, Any]:
        """Return the position as JSON."""
        return {"turn": self._turn, "streams": [stream.state() for stream in self._streams]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to the position that an equal stream had when it returned `state`.

        Raises:
            DataError: if the state has another number of streams, or other files.
        """
        saved = state.get("streams", [state])
        if len(saved) != len(self._streams):
            raise DataError(
                f"{len(self._streams)} streams are read in turn (data.interleave), and the run "
                f"should resume with {len(saved)}. Set data.interleave={len(saved)}, or start a "
                f"new run: name=NAME-2"
            )
        for stream, place in zip(self._streams, saved, strict=True):
            stream.restore(place)
        self._turn = state.get("turn", 0)

    def fingerprint(self) -> str:
        """Return the fingerprints of all streams; empty if one has none."""
        lines = [s.fingerprint() if isinstance(s, Fingerprinted) else "" for s in self._streams]
        return f"in turn: {'; '.join(lines)}" if all(lines) else ""
