"""The values of lines that are read while a model trains on them, and what they build."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.by_step import InOrder
from jtrain.data.batches.sharded_stream import ShardedStream
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.files import found
from jtrain.data.sources.interleaved import InterleavedStream
from jtrain.data.sources.lines import Lines, line_rows
from jtrain.data.text.byte_tokenizer import ByteTokenizer
from jtrain.data.text.documents import pieces
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.errors import DataError


class LineCorpus(NamedTuple):
    """Lines to train on, lines to judge by, and what the numbers mean."""

    asked: "TextLines"
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> ShardedStream:
        """What to train on, as batches."""
        asked = self.asked
        return ShardedStream(
            found(asked.path),
            lambda files: _opened(asked, list(files), seed),
            line_rows(self.vocabulary, asked.context),
            size=size,
            policy=asked.sharing,
        )

    def in_order(self, *, size: int) -> InOrder:
        """What to judge by, as batches: every line once."""
        asked, row = self.asked, line_rows(self.vocabulary, self.asked.context)
        files = found(asked.validation)
        rows = [row(piece.text) for piece in pieces(files, by="line", field=asked.field)]
        if not rows:
            raise DataError(
                f"data.validation={asked.validation} has no line with text in it. Name a file that "
                f"has some."
            )
        return InOrder(Arrays(**{n: np.stack([r[n] for r in rows]) for n in rows[0]}), size=size)


@configclass
class TextLines:
    """Lines of text files, or of JSON lines, a row each; read and made tokens as they come."""

    kind: Literal["lines"] = "lines"
    path: str | list[str]
    """A UTF-8 file, a pattern (`web/*.jsonl`) or a list of them; relative to where you are."""
    validation: str | list[str]
    """Files of lines to judge by; they are held in memory."""
    context: int = Field(default=64, gt=0)
    """Tokens of a line that the model sees; what is longer is cut off."""
    field: str = "text"
    """Where the text of a JSON line stands."""
    buffer: int = Field(default=1000, ge=1)
    """Lines that are held, of which the next one is drawn; 1: in order."""
    interleave: int = Field(default=1, ge=1)
    """Files that are read at once, a line of each in turn; 1: one file after the other. Above 1 the
    buffer holds as many lines of each, all together no more than it says."""
    tokenizer: str = ""
    """A tokenizer.json, or that of a folder that `jtrain data prepare` wrote; empty: bytes."""
    sharing: Literal["auto", "file", "data", "off"] = "auto"
    """What a process reads: files of its own (file), all files of which it keeps its rows (data),
    all of everything (off); auto takes file where each gets as many, else data. With data the order
    is the same for any number of processes."""

    def build(self) -> LineCorpus:
        """The lines.

        Raises:
            DataError: no such file, or no tokenizer in it.
        """
        tokenizer = read_tokenizer(self.tokenizer) if self.tokenizer else ByteTokenizer()
        return LineCorpus(self, tokenizer)


def _opened(asked: TextLines, files: list[Path], seed: int) -> Lines | InterleavedStream:
    """The lines of the files, one file after the other, or those of several in turn."""
    count = min(asked.interleave, len(files))
    buffer = max(1, asked.buffer // count)
    parts = [
        Lines(files[first::count], field=asked.field, buffer=buffer, seed=seed + first)
        for first in range(count)
    ]
    return parts[0] if count == 1 else InterleavedStream(parts)
