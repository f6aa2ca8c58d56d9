"""Numbers of numpy and JAX as arguments: converted to Python's, which are hashed and stored."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")


def to_number(x: Any) -> Any:
    """Return a scalar of numpy or JAX as a Python number, and anything else as it is."""
    jax = sys.modules.get("jax")
    traced = jax is not None and isinstance(x, jax.core.Tracer)  # it has no number yet
    is_scalar = getattr(x, "ndim", None) == 0 and hasattr(x, "item") and not traced
    return x.item() if is_scalar and getattr(x.dtype, "kind", "") in {*"biuf"} else x


def plain_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """Convert numbers of numpy and JAX in the arguments that are annotated as numbers."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    numbers = {name for name, x in signature.parameters.items() if _is_number(x.annotation)}
    one = lambda name, x: to_number(x) if name in numbers else x

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        placed = [one(name, x) for name, x in zip(names, args, strict=False)] + [
            *args[len(names) :]
        ]
        # Pyright cannot see that the arguments are still those of the signature.
        return function(*placed, **{name: one(name, x) for name, x in kwargs.items()})  # pyright: ignore[reportCallIssue]

    return call


def _is_number(annotation: Any) -> bool:
    return any(kind in (int, float) for kind in (annotation, *get_args(annotation)))
