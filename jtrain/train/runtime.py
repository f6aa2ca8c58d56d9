"""Runtime of a process: its allocator, garbage collection, leaked tracers."""

import contextlib
import ctypes
import gc
import inspect
import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax.core

from jtrain.core.loss import Stateful
from jtrain.core.types import LossFn
from jtrain.errors import LossError

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
ARENAS = 4
"""Of one, the threads of XLA's compiler wait for one another: it took 1.7 times as long."""
LARGEST = 1 << 28
"""Bytes of an allocation above which it is returned to the system when it is freed."""


def reuse_memory() -> bool:
    """Make glibc reuse the memory of allocations up to 256 MiB; return whether it does.

    XLA:CPU allocates the temporaries of a program anew at every call. By default glibc maps an
    allocation of more than 32 MiB afresh, and in another thread than the first one of more than
    64 MiB, so each page of it faults at every step: a quarter of the time of a small transformer's
    step (docs/decisions.md). Here all come from few arenas, and 512 MiB at their ends
    are not returned. Arenas must be limited before JAX starts its threads; afterwards allocations
    of more than 64 MiB are mapped as before.

    Nothing is changed where the C library is another one, where `JAX_PLATFORMS` names an
    accelerator, or where the user has set `GLIBC_TUNABLES` or a variable `MALLOC_...`:
    `MALLOC_TRIM_THRESHOLD_=131072` turns it off.
    """
    decided = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] in ("", "cpu")
    if decided or not on_cpu or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(MMAP_THRESHOLD, LARGEST):
        return False  # of an older glibc, whose limit is 32 MiB: the others would gain nothing
    return all([mallopt(TRIM_THRESHOLD, 2 * LARGEST), mallopt(ARENA_MAX, ARENAS)])


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


TYPE = (
    'Return values that are needed later as metrics: return loss, {"name": jt.Mean.of(values, '
    'batch["mask"])}; or print it: jax.debug.print("{}", x).'
)


def find_leaked_tracers(loss: LossFn | Stateful) -> list[str]:
    """Return the names through which a loss reaches values of a finished trace."""
    function = inspect.unwrap(loss.loss if isinstance(loss, Stateful) else loss)
    if not inspect.isfunction(function):
        return []
    found = inspect.getclosurevars(function)
    reached = {**found.globals, **found.nonlocals}
    return [name for name, value in reached.items() if any(map(_is_tracer, _within(value)))]


def warn_leaked_tracers(loss: LossFn | Stateful) -> None:
    """Warn if a traced loss stored values of its trace, which hold no numbers."""
    if names := find_leaked_tracers(loss):
        warnings.warn(
            f"the loss stored a value of its trace {_where(names)}that holds no number. {TYPE}",
            stacklevel=2,
        )


def explain_leaked_tracer(error: Exception, loss: LossFn | Stateful) -> LossError | None:
    """Return an explanation of an error that such a value caused; None for another error.

    A program that was traced with a value of an earlier trace needs one input more than it gets.
    """
    if not (isinstance(error, TypeError) and "Computation compiled for" in str(error)):
        return None
    return LossError(
        f"the loss uses a value that it stored {_where(find_leaked_tracers(loss))}while it "
        "was traced "
        f"before, and which holds no numbers. {TYPE}"
    )


def _where(names: list[str]) -> str:
    return f"in `{'`, `'.join(names)}` " if names else ""


def _within(value: Any) -> Iterator[Any]:
    """Yield the value and its direct contents."""
    yield value
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif not isinstance(value, type) and not inspect.ismodule(value) and not callable(value):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


ARGUMENTS, VALUES, CODE, ENVIRONMENT = "arguments", "values", "code", "environment"
