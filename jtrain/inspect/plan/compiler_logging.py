"""Suppression of compiler output on standard error."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
    """Discard all output on standard error, including that of C++ libraries."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
