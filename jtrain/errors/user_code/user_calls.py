"""Calls of a user's functions, whose errors show the user's own frames and what to type."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jtrain.errors import CodeError, LossError, UserError
from jtrain.errors.tracebacks import format_error, frame_lines, is_user_file, user_frames
from jtrain.errors.user_code.advice import advise
from jtrain.errors.user_code.explain import UserCodeFailure

# Raised by the machine and not by the user's code: another try may succeed.
OUTSIDE = (MemoryError, KeyboardInterrupt, ConnectionError, TimeoutError)


@contextlib.contextmanager
def user_code(what: str, batch: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Raise an error within as a CodeError, if the user's own code caused it.

    The original error is its `__context__`, and its `__cause__` where JAX is asked for full
    tracebacks (JAX_TRACEBACK_FILTERING=off).

    Args:
        what: name of the called function: "the loss", "`build`".
        batch: its batch, for advice.

    Raises:
        CodeError: instead of the error, with the user's frames, the first line of the error and
            what to type.
    """
    try:
        yield
    except UserError as error:
        _add_place(error)
        raise
    except OUTSIDE:
        raise
    except Exception as error:
        message = describe_call(error, what, batch)
        if message is None:
            raise
        raise CodeError(message) from (error if full_tracebacks() else None)


def describe_call(
    error: Exception, what: str, batch: Mapping[str, Any] | None = None
) -> str | None:
    """Return the CodeError for an error in a user's code; None if the user cannot fix it."""
    links = list(user_frames(error.__traceback__))
    if not links or _comes_from_outside(error):
        return None
    found = advise(UserCodeFailure(error, what, links[-1], batch or {}))
    frames = frame_lines(error.__traceback__)
    return f"{found.happened}:\n{frames}\n{format_error(error)}\n{found.type}"


def _add_place(error: UserError) -> None:
    """Add the user's lines to an error that already has its advice."""
    frames = frame_lines(error.__traceback__)
    if frames and '  File "' not in str(error):
        error.args = (f"{error}\n{frames}",)


def _comes_from_outside(error: Exception) -> bool:
    """Return whether the machine caused an error: a disk, a network, a device without memory."""
    paths = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    if isinstance(error, OSError):
        return not isinstance(error, (FileExistsError, *paths))
    return type(error).__name__ in {"JaxRuntimeError", "XlaRuntimeError"}


def full_tracebacks() -> bool:
    """Return whether JAX's setting asks for full tracebacks."""
    return os.environ.get("JAX_TRACEBACK_FILTERING", "") == "off"


def check_takes(function: Any, names: Sequence[str], what: str) -> None:
    """Check that a function can be called with arguments of these names, in their order.

    Raises:
        LossError: with its place, what it takes, and the line to write.
    """
    if not callable(function):
        made = " For a classifier: jt.classifier(model)." if what == "the loss" else ""
        raise LossError(
            f"{what} is a function of ({', '.join(names)}), and this is a "
            f"{type(function).__name__}. Write: def {_name(what)}({', '.join(names)}): ...{made}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C has no signature
        return
    try:
        signature.bind(*names)
    except TypeError:
        called = getattr(function, "__name__", type(function).__name__)
        called = _name(what) if called == "<lambda>" else called
        raise LossError(
            f"{what} is called as {called}({', '.join(names)}), and it takes {signature}:\n"
            f"{_place(function)}Write: def {called}({', '.join(names)}):"
        ) from None


def _name(what: str) -> str:
    return what.split()[-1].strip("`")


def _place(function: Callable[..., Any]) -> str:
    """Return the line on which a function begins, as a traceback shows it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ""
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n'
