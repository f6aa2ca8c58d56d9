"""The configs of texts: characters, tokens (prepared or random), mixtures, pairs for embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.by_step import InOrder, Shuffled
from jtrain.data.batches.mixed import MixedBatches
from jtrain.data.batches.shuffle import integers
from jtrain.data.batches.stream import ShardedStream
from jtrain.data.sources.arrays import Arrays, hold_out_last
from jtrain.data.sources.files import find_files
from jtrain.data.sources.parquet import iterate_rows
from jtrain.data.sources.source import Source
from jtrain.data.text.documents import read_pieces, read_text
from jtrain.data.text.lines import Lines, make_line_rows
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.token_rows import Packed, Windows
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizers import (
    HALF_PAIR,
    SURROGATE,
    ByteTokenizer,
    Tokenizer,
    Vocabulary,
    check_same_tokenizer,
)
from jtrain.errors import DataError


class Corpus(NamedTuple):
    """A training text, a validation text, and the vocabulary of both."""

    train: Source
    validation: Source  # every target occurs once
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> Shuffled:
        """Return the batches to train on."""
        return Shuffled(self.train, size=size, seed=seed)

    def in_order(self, *, size: int) -> InOrder:
        """Return the batches to validate on."""
        return InOrder(self.validation, size=size)


def build_corpus(train: str, validation: str, *, context: int) -> Corpus:
    """Return windows of `context` targets over both texts, and their vocabulary of characters."""
    vocabulary = Vocabulary("".join(sorted(set(train) | set(validation))))
    return Corpus(
        Windows(vocabulary.encode(train), context=context),
        Windows(vocabulary.encode(validation), context=context, stride=context),
        vocabulary,
    )


@configclass
class Text:
    """Files of text, character by character."""

    kind: Literal["text"] = "text"
    path: str | list[str]
    """A UTF-8 file, a pattern (`plays/*.txt`) or a list of them; relative to the working folder."""
    context: int = Field(default=64, gt=0)
    """Context length in characters."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the text, at its end, that is held out for validation."""

    def build(self) -> Corpus:
        """Read the text and split it in two."""
        text = read_text(self.path)
        cut = len(text) - round(len(text) * self.validation)
        return build_corpus(text[:cut], text[cut:], context=self.context)


@configclass
class Tokens:
    """A folder of token files written by `jtrain data prepare`."""

    kind: Literal["tokens"] = "tokens"
    path: str
    """The folder; relative to the working folder."""
    context: int = Field(default=64, gt=0)
    """Context length in tokens."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of the tokens, at their end, that is held out for validation."""
    pack: bool = False
    """Pack complete documents into rows, separated by `segments`; else rows begin at any token and
    continue over the end of a document."""
    tokenizer: str = ""
    """The fingerprint that the tokenizer must have, as `jtrain data show` prints it; empty: any."""

    def build(self) -> Corpus:
        """Open the tokens and split them in two."""
        files, context = TokenFiles(self.path, tokenizer=self.tokenizer), self.context
        train, validation = files.split(self.validation)
        if self.pack:
            packed = [Packed(part, context=context) for part in (train, validation)]
            return Corpus(packed[0], packed[1], files.tokenizer)
        windows = Windows(train, context=context)
        each_once = Windows(validation, context=context, stride=context)
        return Corpus(windows, each_once, files.tokenizer)


class MixedCorpus(NamedTuple):
    """Training texts with their weights, validation texts, and their common vocabulary."""

    train: Mapping[str, tuple[Source, float]]
    validation: Mapping[str, Source]
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> MixedBatches:
        """Return the batches to train on: each text has its share after any number of rows."""
        return MixedBatches(self.train, size=size, seed=seed)

    def in_order(self, *, size: int) -> dict[str, InOrder]:
        """Return the batches to validate on: each text by itself."""
        return {name: InOrder(source, size=size) for name, source in self.validation.items()}


@configclass
class MixturePart:
    """One text of a mixture."""

    path: str
    """Its folder of token files; relative to the working folder."""
    weight: float = Field(gt=0)
    """Its share of the rows, relative to the other weights: 0.7 and 0.3 equal 7 and 3."""


@configclass
class Mixture:
    """Folders of token files by weight; each folder has a validation set of its own."""

    kind: Literal["mixture"] = "mixture"
    parts: dict[str, MixturePart] = Field(min_length=1)
    """The texts, by names of your choice."""
    context: int = Field(default=64, gt=0)
    """Context length in tokens."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """The share of each text, at its end, that is held out for validation."""
    pack: bool = False
    """Pack complete documents into rows, separated by `segments`."""
    tokenizer: str = ""
    """The fingerprint that the tokenizer must have, as `jtrain data show` prints it; empty: any
    tokenizer, but the same for all texts."""

    def build(self) -> MixedCorpus:
        """Open the texts and split each in two.

        Raises:
            DataError: a folder that is incomplete, is too short or has another tokenizer.
        """
        same = {"context": self.context, "validation": self.validation}
        same |= {"pack": self.pack, "tokenizer": self.tokenizer}
        corpora = {n: Tokens(path=part.path, **same).build() for n, part in self.parts.items()}
        check_same_tokenizer({self.parts[n].path: one.vocabulary for n, one in corpora.items()})
        return MixedCorpus(
            {name: (corpus.train, self.parts[name].weight) for name, corpus in corpora.items()},
            {name: corpus.validation for name, corpus in corpora.items()},
            next(iter(corpora.values())).vocabulary,
        )


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
        numbers = [tokenizer.encode(mark, special=True) for mark in self.marks]
        if [len(found) for found in numbers] not in ([], [1, 1]):
            raise DataError(
                f"data.marks={list(self.marks)} should be two special tokens of the tokenizer "
                f"{self.tokenizer or 'of bytes'}, before and after a text, and they are not. Set "
                f'data.marks=\'["[CLS]", "[SEP]"]\', or data.marks=[].'
            )
        empty = np.zeros(0, np.int64)
        return (numbers[0], numbers[1]) if numbers else (empty, empty)

    def _read(self) -> Iterator[_Texts]:
        columns = ["anchor", "positive", *(["negatives"] if self.negatives else [])]
        for where, row in iterate_rows(self.path, columns, noun="row"):
            yield self._checked(where, row)

    def _checked(self, where: str, row: Any) -> _Texts:
        fields = row if isinstance(row, dict) else {}
        others = fields.get("negatives") or []
        others = others[: self.negatives] if isinstance(others, list) else []
        texts: list[Any] = [fields.get("anchor"), fields.get("positive"), *others]
        if len(others) < self.negatives or not all(isinstance(x, str) and x for x in texts):
            found = ", ".join(fields) or type(row).__name__
            raise DataError(
                f"{where} needs an `anchor`, a `positive` and {self.negatives} `negatives` "
                f"(data.negatives), all text that is not empty, and has {found}. Write each row as "
                f'{{"anchor": ..., "positive": ..., "negatives": [...]}}; '
                f"jtrain.models.hard_negatives finds negatives."
            )
        if any(map(SURROGATE.search, texts)):
            raise DataError(f"{where} {HALF_PAIR}. Remove the row, or the half.")
        return texts


class LineCorpus(NamedTuple):
    """Training lines, validation lines, and their tokenizer."""

    config: "TextLines"
    vocabulary: Tokenizer

    def shuffled(self, *, size: int, seed: int) -> ShardedStream:
        """Return the batches to train on."""
        config = self.config
        return ShardedStream(
            find_files(config.path),
            lambda files: Lines(files, field=config.field, buffer=config.buffer, seed=seed),
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


class RandomTokens:
    """Rows of tokens, `tokens` int32 (n, context + 1), each a function of its index."""

    def __init__(self, rows: int, context: int, vocab: int):
        self._rows, self._context, self._vocab = rows, context, vocab

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of these indices."""
        time = self._context + 1
        lanes = indices.astype(np.int64)[:, None] * time + np.arange(time)  # b t+1
        drawn = integers(0, 0, lanes.ravel(), 0, self._vocab).reshape(lanes.shape).astype(np.int32)
        length = np.full(len(indices), self._context, np.int32)
        return {"tokens": drawn, "length": length}

    def fingerprint(self) -> str:
        """Return the fingerprint: the number of rows, the context and the vocabulary."""
        return f"rows={self._rows} context={self._context} vocab={self._vocab}"


class NumberVocabulary(Tokenizer):
    """A vocabulary whose tokens are their own numbers."""

    kind = "numbers"
    end: int | None = None

    def __init__(self, vocab: int):
        self._vocab = vocab

    def __len__(self) -> int:
        return self._vocab

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:  # n
        """Return the numbers in a text, with blanks between them, as uint32."""
        del special  # there are none
        return np.array(text.split(), np.uint32)

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(str(int(number)) for number in numbers)

    def description(self) -> dict[str, Any]:
        """Return the kind and the number of tokens."""
        return {"kind": self.kind, "vocab": self._vocab}


@configclass
class UniformTokens:
    """Uniformly random tokens, from which a model learns nothing."""

    kind: Literal["random"] = "random"
    vocab: int = Field(default=50257, gt=0)
    """Vocabulary size."""
    context: int = Field(default=1024, gt=0)
    """Context length in tokens."""
    rows: int = Field(default=4096, gt=0)
    """Training rows; there are a sixteenth as many validation rows, and at least one."""

    def build(self) -> Corpus:
        """Build the rows, which are computed when they are read."""
        train = RandomTokens(self.rows, self.context, self.vocab)
        validation = RandomTokens(max(1, self.rows // 16), self.context, self.vocab)
        return Corpus(train, validation, NumberVocabulary(self.vocab))
