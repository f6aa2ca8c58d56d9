"""Several files read in turn: sources by index, and streams."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrain.data.batches.fingerprint import Fingerprinted, fingerprint
from jtrain.data.batches.stream import Stream
from jtrain.data.sources.source import Source
from jtrain.errors import DataError


class Interleaved:
    """The rows of several sources in turn: the first of each, the second of each, and so on.

    A source that has no row left is passed over. It is the order in which `InOrder` reads, and of
    files that lie on several disks the reading is spread over all of them; what `Shuffled` draws
    it draws from all sources in any case.

    Raises:
        DataError: if no source has a row.
    """

    def __init__(self, sources: Sequence[Source]):
        self.parts = list(sources)
        lengths = np.array([len(part) for part in self.parts], np.int64)
        if not lengths.sum():
            raise DataError(
                f"{len(self.parts)} sources were to be read in turn, and none has a row. Give at "
                f"least one that has some."
            )
        # Between two of these rounds the same sources still have rows: those of `_active`.
        ends = np.unique(lengths[lengths > 0])
        begins = np.concatenate([[0], ends[:-1]])
        self._active = [np.flatnonzero(lengths > begin) for begin in begins]
        self._begins = begins
        counts = (ends - begins) * np.array([len(active) for active in self._active])
        self._first = np.concatenate([[0], np.cumsum(counts)])  # row of each phase, and the length

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        of, rows = self._places(indices)
        batch: dict[str, np.ndarray] = {}
        for number in np.unique(of).tolist():
            here = np.flatnonzero(of == number)
            for name, array in self.parts[number][rows[here]].items():
                if name not in batch:
                    batch[name] = np.empty((len(indices), *array.shape[1:]), array.dtype)
                if batch[name].shape[1:] != array.shape[1:] or batch[name].dtype != array.dtype:
                    raise DataError(
                        f"Rows of a batch are alike, and `{name}` of source {number} is "
                        f"{array.dtype} {array.shape[1:]} where it was {batch[name].dtype} "
                        f"{batch[name].shape[1:]} before. Make them alike where they are written."
                    )
                batch[name][here] = array
        return batch

    def fingerprint(self) -> str:
        """What the data is, in a line; empty if a source cannot say."""
        said = [fingerprint(part) for part in self.parts]
        return f"in turn: {'; '.join(said)}" if all(said) else ""

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # each int64, b
        """The source of each row, and the row of that."""
        of, rows = np.empty_like(indices), np.empty_like(indices)
        phases = np.searchsorted(self._first, indices, "right") - 1
        for phase in np.unique(phases).tolist():
            here, active = np.flatnonzero(phases == phase), self._active[phase]
            rounds, turn = np.divmod(indices[here] - self._first[phase], len(active))
            of[here], rows[here] = active[turn], self._begins[phase] + rounds
        return of, rows


class InterleavedStream:
    """A stream that takes one thing from each of several streams in turn.

    All are endless, so each gives an equal share however long its files are; a place is kept as
    those of all streams, and whose turn it is.
    """

    def __init__(self, streams: Sequence[Stream]):
        self._streams, self._turn = list(streams), 0

    def next(self) -> Any:
        """The next thing."""
        found = self._streams[self._turn].next()
        self._turn = (self._turn + 1) % len(self._streams)
        return found

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON."""
        return {"turn": self._turn, "streams": [stream.state() for stream in self._streams]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where a stream like this one was when it gave `state`.

        Raises:
            DataError: if that had another number of streams, or other files.
        """
        kept = state.get("streams", [state])
        if len(kept) != len(self._streams):
            raise DataError(
                f"{len(self._streams)} streams are read in turn (data.interleave), and the run was "
                f"to go on with {len(kept)}. Set data.interleave={len(kept)}, or start a new run: "
                f"name=NAME-2"
            )
        for stream, place in zip(self._streams, kept, strict=True):
            stream.restore(place)
        self._turn = state.get("turn", 0)

    def fingerprint(self) -> str:
        """What the data is, in a line; empty if a stream cannot say."""
        said = [s.fingerprint() if isinstance(s, Fingerprinted) else "" for s in self._streams]
        return f"in turn: {'; '.join(said)}" if all(said) else ""
