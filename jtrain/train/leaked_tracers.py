"""Leaked tracers: values of a trace that a loss stored in a global, closure, list or attribute."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax.core

from jtrain.core.loss import Stateful
from jtrain.core.types import LossFn
from jtrain.errors import LossError

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
