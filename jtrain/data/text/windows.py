"""Windows over a long row of tokens: the rows of a language model."""

from typing import Any

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_tokens
from jtrain.data.text.token_files import TokenRange
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers


class Windows:
    """`tokens` (int32, b t+1) and `length` (int32, b: how many of the t targets are real).

    A window starts at every `stride`-th token. For training use stride 1, the default: a row may
    start at any place of the text. For evaluation use `stride=context`: every token but the first
    is a target exactly once. The last window may be short: behind its `length` it repeats the last
    token. From a memory-mapped array and from a folder (`TokenFiles`) only the windows that are
    requested are read.

    Raises:
        DataError: a context or a stride that does not fit the tokens.
    """

    @plain_numbers
    def __init__(
        self, tokens: np.ndarray | TokenRange, *, context: int, stride: int = 1
    ):  # tokens: n
        longest = len(tokens) - 1  # a window has one token more than targets
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"Windows need one row of whole numbers; these tokens are {tokens.dtype} of shape "
                f"{tokens.shape}. Flatten them: tokens.ravel().astype('uint16')."
            )
        if longest < 1:
            raise DataError(
                f"Windows of context {context} were requested from {len(tokens)} tokens. "
                f"A text has at least 2 tokens: give another file."
            )
        if not 1 <= context <= longest:
            raise DataError(
                f"context {context} does not fit {len(tokens)} tokens, where the longest is "
                f"{longest}. Set context={min(max(context, 1), longest)} or give a longer text."
            )
        if not 1 <= stride <= context:
            raise DataError(
                f"stride {stride} is not in 1 .. {context} (the context): windows would "
                f"{'skip tokens' if stride > context else 'never move'}. Set stride={context} to "
                f"use each target once, or stride=1 to start a window at every token."
            )
        self.tokens, self.context, self.stride = tokens, context, stride
        if isinstance(tokens, TokenRange):
            self._rows = lambda starts: tokens.gather(starts, context + 1)
        else:
            self._rows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1).__getitem__
        self._length = 1 + -(-(longest - context) // stride)

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return _windows, (self.tokens, self.context, self.stride)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        starts = indices * self.stride
        last = len(self.tokens) - 1 - self.context
        rows = self._rows(np.minimum(starts, last)).astype(np.int32)
        length = np.minimum(self.context, len(self.tokens) - 1 - starts).astype(np.int32)
        for short in np.flatnonzero(starts > last):  # no window, or the last one
            rest = self.tokens[starts[short] :]
            rows[short] = rest[-1]
            rows[short, : len(rest)] = rest
        return {"tokens": rows, "length": length}

    def fingerprint(self) -> str:
        """Return the fingerprint of the tokens."""
        return fingerprint_tokens(self.tokens)


def _windows(tokens: np.ndarray | TokenRange, context: int, stride: int) -> Windows:
    """Rebuild the windows in another process, as pickling a view of them would copy them."""
    return Windows(tokens, context=context, stride=stride)
