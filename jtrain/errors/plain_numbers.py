"""Numbers of numpy and JAX as arguments: converted to Python's, which are hashed and stored."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")


def to_number(x: Any) -> Any:
    """Return a scalar of numpy or JAX as a Python number, and anything else as it is."""
    is_scalar = getattr(x, "ndim", None) == 0 and hasattr(x, "item")
    return x.item() if is_scalar and getattr(x.dtype, "kind", "") in {*"biuf"} else x


def number_converter(
    function: Callable[..., object],
) -> Callable[[tuple, Mapping[str, Any]], tuple[list, dict[str, Any]]]:
    """Return a function that converts the arguments that `function` annotates as numbers."""
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    numbers = {name for name, parameter in parameters.items() if _is_number(parameter.annotation)}

    def convert(args: tuple, kwargs: Mapping[str, Any]) -> tuple[list, dict[str, Any]]:
        one = lambda name, x: to_number(x) if name in numbers else x
        places = [*names, *[""] * len(args)]
        placed = [one(name, x) for name, x in zip(places, args, strict=False)]
        return placed, {name: one(name, x) for name, x in kwargs.items()}

    return convert


def plain_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """Convert numbers of numpy and JAX in the arguments that are annotated as numbers."""
    convert = number_converter(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        placed, named = convert(args, kwargs)
        return function(*placed, **named)  # pyright: ignore[reportCallIssue]

    return call


def _is_number(annotation: Any) -> bool:
    return any(kind in (int, float) for kind in (annotation, *get_args(annotation)))
