"""Tokenizers of bytes, of characters, and of byte pairs (the package `tokenizers`)."""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError

SURROGATE = re.compile("[\ud800-\udfff]")
HALF_PAIR = "has half of a surrogate pair, such as \\ud800, which is not a character"


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer; `len` is its vocabulary, including the end-of-document token."""

    kind: str  # as in a config
    end: int | None  # the end-of-document token, or None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return the numbers of a text, n: unsigned, in 0 .. len - 1, without an end token.

        A special token that is spelled out in the text is plain text, or with `special` that token.
        """
        ...

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the numbers of each text; on many cores, if that is faster."""
        return [self.encode(text) for text in texts]

    def decode(self, numbers: Sequence[int] | np.ndarray, /) -> str:
        """Return the text of these numbers; invalid bytes become U+FFFD."""
        ...

    def description(self) -> dict[str, Any]:
        """Return all of its content as JSON, from which `tokenizer_file.tokenizer_of` builds it."""
        ...


def decode_known(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Return the text of tokens n, without those beyond the vocabulary: a model may have more."""
    return tokenizer.decode(tokens[tokens < len(tokenizer)])


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return 12 hex digits that identify the tokenizer on any machine, for any library."""
    text = json.dumps(tokenizer.description(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_tokenizer(tokenizer: Tokenizer) -> str:
    """Describe a tokenizer: `bpe 91c3a0b2d4e5 of 4,096 tokens`."""
    return f"{tokenizer.kind} {fingerprint(tokenizer)} of {len(tokenizer):,} tokens"


def check_same_tokenizer(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raise DataError unless all tokenizers, each under the name of its data, are the same.

    Raises:
        DataError: two tokenizers differ; the message has both fingerprints.
    """
    (first, expected), *others = tokenizers.items()
    for name, other in others:
        if fingerprint(other) != fingerprint(expected):
            raise DataError(
                f"All texts need one tokenizer, and {first} was written by "
                f"{describe_tokenizer(expected)}, "
                f"{name} by {describe_tokenizer(other)}. Write {name} again: "
                f"jtrain data prepare FILES --tokenizer {first}/tokenizer.json --out {name}-again"
            )


@contextlib.contextmanager
def check_characters(*texts: str) -> Iterator[None]:
    """Raise DataError where texts cannot be encoded because one has a surrogate."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):  # the package `tokenizers` raises either
        if not (found := next(filter(None, map(SURROGATE.search, texts)), None)):
            raise
        place = found.start() + 1
        raise DataError(f"Character {place} of a text {HALF_PAIR}. Remove it.") from None


class ByteTokenizer(Tokenizer):
    """One token a byte, and 256 for the end of a document."""

    kind = "bytes"
    end: int | None = 256

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:  # n
        """Return the bytes of `text`, as uint16."""
        del special  # there are none
        with check_characters(text):
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these bytes without the ends of documents."""
        numbers = np.asarray(numbers)
        return bytes(numbers[numbers < 256].astype(np.uint8)).decode(errors="replace")

    def description(self) -> dict[str, Any]:
        """Return the kind, which is the complete description."""
        return {"kind": self.kind}


class Vocabulary(Tokenizer):
    """A vocabulary of characters; the number of a character is its rank by code point."""

    kind = "characters"
    end: int | None = None

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        if not characters:
            raise DataError(
                "A vocabulary of no characters was requested. Give the text to be encoded."
            )
        codes = _codes(self.characters)
        self._numbers = np.full(codes[-1] + 1, -1, np.int32)  # by code point; -1 is unknown
        self._numbers[codes] = np.arange(len(codes))
        self._smallest = np.min_scalar_type(len(codes) - 1)

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:  # n
        """Return the numbers of the characters of `text`, in the smallest unsigned type.

        Raises:
            DataError: a character that is not in the vocabulary, by its line and column.
        """
        del special  # there are none
        codes = _codes(text)
        numbers = self._numbers[np.minimum(codes, len(self._numbers) - 1)]
        unknown = (numbers < 0) | (codes >= len(self._numbers))
        if unknown.any():
            place = int(unknown.argmax())
            line = text.count("\n", 0, place) + 1
            column = place - text.rfind("\n", 0, place)
            raise DataError(
                f"Character {text[place]!r} at line {line}, column {column} is not among the "
                f"{len(self)} of the vocabulary. Leave it out, or build the vocabulary from a text "
                f"that has it: Vocabulary(train + validation)."
            )
        return numbers.astype(self._smallest)

    def description(self) -> dict[str, Any]:
        """Return the kind and the characters."""
        return {"kind": self.kind, "characters": self.characters}

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these numbers."""
        return "".join(self.characters[number] for number in np.asarray(numbers).tolist())


def _codes(text: str) -> np.ndarray:
    """Return the code point of each character."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


SMALLEST = 257  # every byte, and the end-of-document token


class BPE(Tokenizer):
    """The tokenizer of a tokenizer.json (its parsed JSON), with any model.

    A special token that is spelled out in a text is encoded as plain text, unless asked for. A text
    is neither cut nor padded to a length, which some published files ask for.

    Args:
        end: the end-of-document token; there is none if the vocabulary lacks it.

    Raises:
        DataError: no tokenizer, or the package is not installed.

    Source: Sennrich, Haddow and Birch 2016, arXiv 1508.07909; over bytes: GPT-2, 2019.
    """

    kind = "bpe"

    def __init__(self, parsed: dict[str, Any], *, end: str):
        self._parsed, self._end = parsed, end
        try:
            self._tokenizer = self._build()
        except DataError:
            raise
        except Exception as error:
            keys = ", ".join(list(parsed)[:5]) or "nothing"
            raise DataError(
                f"A tokenizer.json was expected; this file has the keys {keys} and cannot be read "
                f"({error}). Give a file that Tokenizer.save of the package `tokenizers` wrote."
            ) from error
        self._tokenizer.encode_special_tokens = True
        # Not their count: where numbers are left out, a token has a larger one.
        self._length = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self._smallest = np.dtype(np.uint16 if self._length <= 1 << 16 else np.uint32)
        self.end: int | None = self._tokenizer.token_to_id(end)

    def __len__(self) -> int:
        return self._length

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:  # n
        """Return the numbers of the pieces of `text`; with `special`, special tokens are theirs."""
        if not special:
            return self.encode_all([text])[0]
        with check_characters(text):
            found = self._with_special.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, self._smallest)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the numbers of each text, on all cores."""
        with check_characters(*texts):
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, self._smallest) for one in found]

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these numbers without the ends of documents."""
        known = [number for number in np.asarray(numbers).tolist() if number != self.end]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    @functools.cached_property
    def _with_special(self) -> Any:
        """The tokenizer that reads special tokens; the other one may be at work on a thread."""
        return self._build()

    def _build(self) -> Any:
        tokenizer = _package().Tokenizer.from_str(json.dumps(self._parsed))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def description(self) -> dict[str, Any]:
        """Return the kind, the content of the file, and the end-of-document token."""
        return {"kind": self.kind, "end": self._end, "tokenizer": self._parsed}


def train_bpe(texts: Iterable[str], *, vocab: int, end: str) -> BPE:
    """Train a byte-level BPE of `vocab` tokens, including the end of a document, on `texts`.

    Words are split as in GPT-2. The same texts give the same tokenizer.

    Raises:
        DataError: no text, too small a `vocab`, or a larger one than the texts give.
    """
    if vocab < SMALLEST:
        raise DataError(
            f"A BPE of {vocab} tokens was requested, and the bytes and the end of documents alone "
            f"are {SMALLEST}. Set vocab={SMALLEST} or more; 4096 suits a few megabytes."
        )
    package = _package()
    pieces = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[end],
        initial_alphabet=sorted(pieces.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab:
        raise DataError(
            f"A BPE of {vocab} tokens was requested, and these texts give {found}: no more pairs "
            f"of pieces occur. Set vocab={found} or less, or give more text."
        )
    return BPE(json.loads(tokenizer.to_str()), end=end)


def _package() -> Any:
    return import_optional("tokenizers", "text", "A BPE tokenizer")
