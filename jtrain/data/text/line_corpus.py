"""The config of lines of text, streamed and tokenized while a model trains on them."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.by_step import InOrder
from jtrain.data.batches.sharded_stream import ShardedStream
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.files import find_files
from jtrain.data.sources.interleaved import InterleavedStream
from jtrain.data.sources.lines import Lines, make_line_rows
from jtrain.data.text.documents import read_pieces
from jtrain.data.text.tokenizer import ByteTokenizer, Tokenizer
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.errors import DataError


class LineCorpus(NamedTuple):
    """Training lines, validation lines, and their tokenizer."""

    config: "TextLines"
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> ShardedStream:
        """Return the batches to train on."""
        config = self.config
        return ShardedStream(
            find_files(config.path),
            lambda files: _open_lines(config, list(files), seed),
            make_line_rows(self.vocabulary, config.context),
            size=size,
            policy=config.sharing,
        )

    def in_order(self, *, size: int) -> InOrder:
        """Return the batches to validate on: every line once."""
        config, row = self.config, make_line_rows(self.vocabulary, self.config.context)
        files = find_files(config.validation)
        rows = [row(piece.text) for piece in read_pieces(files, by="line", field=config.field)]
        if not rows:
            raise DataError(
                f"data.validation={config.validation} has no line with text in it. Name a file "
                "that has some."
            )
        return InOrder(Arrays(**{n: np.stack([r[n] for r in rows]) for n in rows[0]}), size=size)


@configclass
class TextLines:
    """Lines of text files, or of JSON lines, a row each; read and tokenized while training."""

    kind: Literal["lines"] = "lines"
    path: str | list[str]
    """A UTF-8 file, a pattern (`web/*.jsonl`) or a list of them; relative to the working folder."""
    validation: str | list[str]
    """Files of lines to validate on, which are held in memory."""
    context: int = Field(default=64, gt=0)
    """Context length in tokens; longer lines are cut off."""
    field: str = "text"
    """The field of a JSON line that has the text; empty: learn JSON as it is."""
    buffer: int = Field(default=1000, ge=1)
    """Lines in the shuffle buffer, from which the next line is drawn; 1: in order."""
    interleave: int = Field(default=1, ge=1)
    """Files that are read at once, a line of each in turn; 1: one file after the other. Above 1
    each file has an equal share of the buffer."""
    tokenizer: str = ""
    """A tokenizer.json, or the tokenizer in a folder of `jtrain data prepare`; empty: bytes."""
    sharing: Literal["auto", "file", "data", "off"] = "auto"
    """The part that a process reads: its own files (file), its own rows of all files (data), or all
    rows (off); auto takes file if each process gets the same number of files, else data. With data
    the order is the same for any number of processes."""

    def build(self) -> LineCorpus:
        """Build the corpus; the lines are read later.

        Raises:
            DataError: no such file, or no tokenizer in it.
        """
        tokenizer = read_tokenizer(self.tokenizer) if self.tokenizer else ByteTokenizer()
        return LineCorpus(self, tokenizer)


def _open_lines(config: TextLines, files: list[Path], seed: int) -> Lines | InterleavedStream:
    """Open the lines of the files: one file after the other, or several in turn."""
    count = min(config.interleave, len(files))
    buffer = max(1, config.buffer // count)
    parts = [
        Lines(files[first::count], field=config.field, buffer=buffer, seed=seed + first)
        for first in range(count)
    ]
    return parts[0] if count == 1 else InterleavedStream(parts)
