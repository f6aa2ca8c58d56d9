"""Pause of Python's cyclic garbage collection while programs are traced."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no cycles in a `with` block: tracing makes objects, and drops few of them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
