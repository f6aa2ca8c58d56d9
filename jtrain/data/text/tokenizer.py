"""What turns text into numbers and back, and how two of them are told apart."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.errors import DataError


@runtime_checkable
class Tokenizer(Protocol):
    """A member is a class with these; `len` is its vocabulary, the end of a document included."""

    kind: str  # as a config spells it
    end: int | None  # the token behind every document, or None where there is none

    def __len__(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text, n: unsigned, in 0 .. len - 1, without an end."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers of each text; on many cores, where that is quicker."""
        ...

    def decode(self, numbers: Sequence[int] | np.ndarray, /) -> str:
        """The text of these numbers; what is no text becomes U+FFFD."""
        ...

    def description(self) -> dict[str, Any]:
        """All that it is made of, as JSON: `tokenizer_file.tokenizer_of` makes it again."""
        ...


def fingerprint(tokenizer: Tokenizer) -> str:
    """12 hex digits that no other tokenizer has; the same on any machine, and for any library."""
    text = json.dumps(tokenizer.description(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def spelt(tokenizer: Tokenizer) -> str:
    """A tokenizer in words: `bpe 91c3a0b2d4e5 of 4,096 tokens`."""
    return f"{tokenizer.kind} {fingerprint(tokenizer)} of {len(tokenizer):,} tokens"


def refuse_mismatch(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raises unless the tokenizers, each under the name of what was written by it, are one.

    Raises:
        DataError: with both fingerprints.
    """
    (first, known), *others = tokenizers.items()
    for name, other in others:
        if fingerprint(other) != fingerprint(known):
            raise DataError(
                f"One tokenizer was to read all of it, and {first} was written by {spelt(known)}, "
                f"{name} by {spelt(other)}. Write {name} again: "
                f"jtrain data prepare FILES --tokenizer {first}/tokenizer.json --out {name}-again"
            )
