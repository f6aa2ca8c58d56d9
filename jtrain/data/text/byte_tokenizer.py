"""Text as its UTF-8 bytes: nothing is learned, and nothing is unknown."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class ByteTokenizer:
    """A token a byte, and 256 for the end of a document."""

    kind = "bytes"
    end: int | None = 256

    def __len__(self) -> int:
        return 257

    def encode(self, text: str) -> np.ndarray:  # n
        """The bytes of `text`, as uint16."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """The text of these bytes; ends of documents are left out."""
        numbers = np.asarray(numbers)
        return bytes(numbers[numbers < 256].astype(np.uint8)).decode(errors="replace")

    def description(self) -> dict[str, Any]:
        """Its kind, which is all there is."""
        return {"kind": self.kind}
