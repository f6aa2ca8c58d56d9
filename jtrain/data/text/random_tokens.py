"""Random tokens, for plans and speed measurements without a text."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.batches.shuffle import integers
from jtrain.data.text.corpora import Corpus
from jtrain.data.text.tokenizers import Tokenizer


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
