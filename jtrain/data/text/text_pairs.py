"""Pairs of texts that belong together, with texts that do not, as rows of tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.json_rows import read_rows
from jtrain.data.sources.subset import hold_out_last
from jtrain.data.text.text import Corpus
from jtrain.data.text.tokenizer import HALF_PAIR, SURROGATE, ByteTokenizer, Tokenizer
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.errors import DataError

_Texts: TypeAlias = list[str]  # anchor, positive, negatives


@configclass
class TextPairs:
    """An anchor, its positive and hard negatives a row, for embeddings.

    Rows have `tokens` (int32, b m t) and `visible` (bool, b m t) of m texts: the anchor, the
    positive, and the negatives.
    """

    kind: Literal["pairs"] = "pairs"
    path: str | list[str]
    """JSON lines or Parquet files, a pattern or a list of them; relative to the working folder. A
    row has an `anchor` and a `positive`, both text, and `negatives`, a list of texts."""
    negatives: int = Field(default=0, ge=0)
    """Hard negatives of each row: the first ones of its list. 0: only those of the batch."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the rows, the last ones, that is held out for validation."""
    context: int = Field(default=64, gt=2)
    """Most tokens of a text, its marks included; a longer one is cut."""
    tokenizer: str = ""
    """A tokenizer.json; empty: bytes."""
    marks: tuple[str, ...] = ()
    """Special tokens before and after a text: BERT's models have `["[CLS]", "[SEP]"]`."""

    def build(self) -> Corpus:
        """Read and encode the texts, and split the rows in two.

        Raises:
            DataError: if there are fewer than two rows, one has another form or too few negatives,
                or the tokenizer lacks a mark.
        """
        tokenizer = read_tokenizer(self.tokenizer) if self.tokenizer else ByteTokenizer()
        pairs = list(self._read())
        parts = hold_out_last(pairs, self.validation, where=self.path, noun="row")
        encoded = [self._encode(tokenizer, part) for part in parts]
        return Corpus(encoded[0], encoded[1], tokenizer)

    def _encode(self, tokenizer: Tokenizer, pairs: Sequence[_Texts]) -> Arrays:
        before, after = self._marks(tokenizer)
        room = self.context - len(before) - len(after)
        shape = (len(pairs), 2 + self.negatives, self.context)
        tokens, visible = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for i, texts in enumerate(pairs):
            for j, text in enumerate(texts):
                numbers = np.concatenate([before, tokenizer.encode(text)[:room], after])
                tokens[i, j, : len(numbers)] = numbers
                visible[i, j, : len(numbers)] = True
        return Arrays(tokens=tokens, visible=visible)

    def _marks(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the marks before and after a text."""
        if len(self.marks) not in (0, 2):
            raise DataError(
                f"data.marks={list(self.marks)} are {len(self.marks)} marks: one before and one "
                f'after a text are needed. Set data.marks=\'["[CLS]", "[SEP]"]\', or data.marks=[].'
            )
        numbers = [tokenizer.encode(mark, special=True) for mark in self.marks]
        for mark, found in zip(self.marks, numbers, strict=True):
            if len(found) != 1:
                raise DataError(
                    f"data.marks has {mark!r}, which the tokenizer {self.tokenizer or 'of bytes'} "
                    f"reads as {len(found)} tokens: it is no special token there. Set "
                    f"data.marks=[], or special tokens of this tokenizer."
                )
        empty = np.zeros(0, np.int64)
        return (numbers[0], numbers[1]) if numbers else (empty, empty)

    def _read(self) -> Iterator[_Texts]:
        columns = ["anchor", "positive", *(["negatives"] if self.negatives else [])]
        form = "an `anchor`, a `positive` and perhaps `negatives`"
        for where, row in read_rows(self.path, columns, noun="row", form=form):
            yield self._checked(where, row)

    def _checked(self, where: str, row: Any) -> _Texts:
        fields = row if isinstance(row, dict) else {}
        texts: list[Any] = [fields.get("anchor"), fields.get("positive")]
        if not all(isinstance(text, str) and text for text in texts):
            found = ", ".join(fields) or type(row).__name__
            raise DataError(
                f"{where} needs an `anchor` and a `positive`, both text that is not empty, and has "
                f'{found}. Write each row as {{"anchor": ..., "positive": ...}}.'
            )
        others = fields.get("negatives") or []
        few = not isinstance(others, list) or len(others) < self.negatives
        if few or not all(isinstance(text, str) and text for text in others[: self.negatives]):
            count = len(others) if isinstance(others, list) else "no list of"
            raise DataError(
                f"{where} has {count} `negatives`, and data.negatives={self.negatives} takes so "
                f"many texts of each row. Set data.negatives=0, or write a list of texts; "
                f"jtrain.models.embeddings.hard_negatives finds them."
            )
        texts += others[: self.negatives]
        if any(map(SURROGATE.search, texts)):
            raise DataError(f"{where} {HALF_PAIR}. Remove the row, or the half.")
        return texts
