"""Byte tokenizer: text as its UTF-8 bytes, without training and without unknown tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class ByteTokenizer:
    """One token a byte, and 256 for the end of a document."""

    kind = "bytes"
    end: int | None = 256

    def __len__(self) -> int:
        return 257

    def encode(self, text: str) -> np.ndarray:  # n
        """Return the bytes of `text`, as uint16."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these bytes without the ends of documents."""
        numbers = np.asarray(numbers)
        return bytes(numbers[numbers < 256].astype(np.uint8)).decode(errors="replace")

    def description(self) -> dict[str, Any]:
        """Return the kind, which is the complete description."""
        return {"kind": self.kind}
