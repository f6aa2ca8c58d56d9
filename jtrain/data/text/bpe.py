"""Byte pair encoding by the `tokenizers` package: learned here, or read from a tokenizer.json."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jtrain.errors import DataError

SMALLEST = 257  # every byte, and the end of a document


class BPE:
    """The tokenizer of a tokenizer.json (its parsed JSON), of whatever model that holds.

    A text that spells out a special token is text like any other.

    Args:
        parsed: what the file holds.
        end: the token behind every document; where the vocabulary lacks it, there is none.

    Raises:
        DataError: no tokenizer, or the package is not there.

    Source: Sennrich, Haddow and Birch 2016, arXiv 1508.07909; over bytes: GPT-2, 2019.
    """

    kind = "bpe"

    def __init__(self, parsed: dict[str, Any], *, end: str):
        self._parsed, self._end = parsed, end
        try:
            self._tokenizer = _package().Tokenizer.from_str(json.dumps(parsed))
        except Exception as error:  # that package raises no narrower class
            if isinstance(error, DataError):
                raise
            keys = ", ".join(list(parsed)[:5]) or "nothing"
            raise DataError(
                f"A tokenizer.json was asked for; this one has the keys {keys} and is not read "
                f"({error}). Give one that Tokenizer.save of the package `tokenizers` wrote."
            ) from error
        self._tokenizer.encode_special_tokens = True
        self._length = self._tokenizer.get_vocab_size()
        self._smallest = np.dtype(np.uint16 if self._length <= 1 << 16 else np.uint32)
        self.end: int | None = self._tokenizer.token_to_id(end)

    def __len__(self) -> int:
        return self._length

    def encode(self, text: str) -> np.ndarray:  # n
        """The numbers of the pieces of `text`."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of each text, on all cores."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, self._smallest) for one in found]

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """The text of these numbers; ends of documents are left out."""
        known = [number for number in np.asarray(numbers).tolist() if number != self.end]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def description(self) -> dict[str, Any]:
        """Its file, and the name of its end."""
        return {"kind": self.kind, "end": self._end, "tokenizer": self._parsed}


def learned(texts: Iterable[str], *, vocab: int, end: str) -> BPE:
    """A BPE over bytes of `vocab` tokens, the end of a document among them, learned from `texts`.

    Words are parted as GPT-2 parts them. The same texts give the same tokenizer.

    Raises:
        DataError: no text, too few tokens asked for, or more than the texts give.
    """
    if vocab < SMALLEST:
        raise DataError(
            f"A BPE of {vocab} tokens was asked for, and the bytes and an end of documents alone "
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
            f"A BPE of {vocab} tokens was asked for, and these texts give {found}: no more pairs "
            f"of pieces occur. Set vocab={found} or less, or give more text."
        )
    return BPE(json.loads(tokenizer.to_str()), end=end)


def _package() -> Any:
    """The `tokenizers` package, imported where it is used."""
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise DataError(
            "A BPE tokenizer was asked for, and the package `tokenizers` is not installed. "
            "Install it: pip install 'jtrain[text]', or take tokenizer=bytes, which needs nothing."
        ) from error
    return tokenizers
