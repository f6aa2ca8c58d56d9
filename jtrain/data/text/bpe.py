"""Byte pair encoding by the `tokenizers` package: trained here, or read from a tokenizer.json."""

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jtrain.data.text.tokenizer import check_characters
from jtrain.errors import DataError

SMALLEST = 257  # every byte, and the end-of-document token


class BPE:
    """The tokenizer of a tokenizer.json (its parsed JSON), with any model.

    A special token that is spelled out in a text is encoded as plain text, unless asked for. A text
    is neither cut nor padded to a length, which some published files ask for.

    Args:
        parsed: the content of the file.
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
        except BaseException as error:
            if not _is_failure(error):
                raise
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
        with check_characters(text), _failures():
            found = self._with_special.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, self._smallest)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the numbers of each text, on all cores."""
        with check_characters(*texts), _failures():
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, self._smallest) for one in found]

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these numbers without the ends of documents."""
        known = [number for number in np.asarray(numbers).tolist() if number != self.end]
        with _failures():
            return self._tokenizer.decode(known, skip_special_tokens=False)

    @functools.cached_property
    def _with_special(self) -> Any:
        """The tokenizer that reads special tokens; the other one may be at work on a thread."""
        return self._build()

    def _build(self) -> Any:
        tokenizer = _import_tokenizers().Tokenizer.from_str(json.dumps(self._parsed))
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
    package = _import_tokenizers()
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


def _is_failure(error: BaseException) -> bool:
    """Return whether the package failed: an `Exception` itself, or a panic, which is none."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise DataError where a tokenizer that could be read fails on a text."""
    try:
        yield
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise DataError(
            f"The tokenizer fails on a text ({error}): a pattern or the vocabulary in its "
            f"tokenizer.json is broken. Download that file again, or give another one."
        ) from None


def _import_tokenizers() -> Any:
    """Import the `tokenizers` package where it is used."""
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise DataError(
            "A BPE tokenizer was requested, and the package `tokenizers` is not installed. "
            "Install it: pip install 'jtrain[text]', or set tokenizer=bytes, which needs nothing."
        ) from error
    return tokenizers
