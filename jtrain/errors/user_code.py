"""Calls by users, and of their functions: errors show their own frames and what to type."""

import contextlib
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from jtrain.errors import (
    CodeError,
    ConfigError,
    DeviceError,
    LossError,
    PeerError,
    UserError,
    cut_traceback,
    format_error,
    frame_lines,
    is_interactive,
    is_user_file,
    user_frames,
)
from jtrain.errors.advice import UserCodeFailure, advise, describe_arrays
from jtrain.errors.plain_numbers import plain_numbers
from jtrain.errors.spelling import SYNONYMS, nearest_name


@contextlib.contextmanager
def user_code(what: str, batch: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Raise an error within as a CodeError, if the user's own code caused it.

    The original error is its `__context__`, and its `__cause__` where JAX is asked for full
    tracebacks (JAX_TRACEBACK_FILTERING=off).

    Args:
        what: name of the called function: "the loss", "`build`".

    Raises:
        CodeError: instead of the error, with the user's frames, the first line of the error and
            what to type.
    """
    try:
        yield
    except UserError as error:
        _add_place(error)
        raise
    except Exception as error:
        message = describe_call(error, what, batch)
        if message is None:
            if batch and isinstance(error, TypeError | ValueError):
                error.add_note(f"{what} was called with a batch of {describe_arrays(batch)}")
            raise
        raise CodeError(message) from (error if full_tracebacks() else None)


def describe_call(
    error: Exception, what: str, batch: Mapping[str, Any] | None = None
) -> str | None:
    """Return the message for an error in a user's code; None if the user cannot fix it."""
    links = list(user_frames(error.__traceback__))
    if not links or _comes_from_outside(error):
        return None
    found = advise(UserCodeFailure(error, what, links[-1], batch or {}))
    frames = frame_lines(error.__traceback__)
    return f"{found.happened}:\n{frames}\n{format_error(error)}\n{found.advice}"


def _add_place(error: UserError) -> None:
    frames = frame_lines(error.__traceback__)
    if frames and '  File "' not in str(error):
        error.args = (f"{error}\n{frames}",)


def _comes_from_outside(error: Exception) -> bool:
    """Return whether the machine caused an error: a disk, a network, too little memory."""
    paths = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
    if isinstance(error, OSError):
        return not isinstance(error, (FileExistsError, *paths))
    if isinstance(error, MemoryError):
        return True
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
        made = " For a classifier: jt.classifier(model)." if what.endswith("loss") else ""
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
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ""
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n'


P = ParamSpec("P")
R = TypeVar("R")


def api_boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Make the errors of a public function short.

    A UserError is raised without the frames of jtrain and JAX. Uncaught, it ends a script with
    the exit code of `jtrain`. JAX_TRACEBACK_FILTERING=off leaves all frames. Arguments that are
    annotated as numbers may be numbers of numpy or JAX.
    """
    converted = plain_numbers(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return converted(*args, **kwargs)
        except (UserError, PeerError, DeviceError) as error:
            found: Exception = error
        except (RuntimeError, AssertionError, TypeError) as error:
            clearer = refused_platform(error) or _wrong_arguments(error, function, kwargs)
            if clearer is None:
                raise
            found = clearer
        exit_by_code()
        if not full_tracebacks():
            _shorten(found)
        raise found

    return call


def _shorten(error: Exception) -> None:
    """Remove the frames of an error, and hide its cause, which stays its `__context__`.

    JAX's note about its own frames goes with them.
    """
    error.__traceback__ = None
    error.__context__, error.__cause__ = error.__cause__ or error.__context__, None  # shows it
    error.__suppress_context__ = True
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]


def _wrong_arguments(
    error: Exception, function: Callable[..., object], given: Mapping[str, object]
) -> ConfigError | None:
    trace = error.__traceback__ and error.__traceback__.tb_next
    if trace is None or trace.tb_next is not None:  # it was raised further inside
        return None
    if "missing" in str(error):
        parameters = inspect.signature(function).parameters.values()
        needed = ", ".join(p.name for p in parameters if p.default is p.empty)
        name, missing = function.__name__, str(error).partition(": ")[2].replace("'", "")
        line = f"jt.{name}({needed})"
        if name == "fit":
            line += "; with a model jt.fit(jt.classifier(model), model, data), or jt.regression"
        return ConfigError(f"{name} was given no {missing}. Write {line}.")
    if "unexpected keyword argument" not in str(error):
        return None
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    others = {other: name for other, name in SYNONYMS.items() if name in names}
    wrong = [name for name in given if name not in names]
    near = [nearest_name(name, [*names, *others]) for name in wrong]
    meant = dict.fromkeys(others.get(name, name) for name in near if name)
    if {"sample_weight", "sample_weights"} & set(wrong):
        advice = "Weights of rows are an array of the data: dict(x=..., y=..., weight=...)."
    else:
        advice = f"Did you mean {_assigned(meant)}?" if all(near) else f"It has {', '.join(names)}."
    many = "s" if len(wrong) > 1 else ""
    name = function.__qualname__.removesuffix(".__init__")
    return ConfigError(f"{name} has no argument{many} {_assigned(wrong)}. {advice}")


def _assigned(names: Iterable[str]) -> str:
    return ", ".join(f"{name}=" for name in names)


def exit_by_code() -> None:
    """Make an uncaught error of jtrain end the script by its `code`, in a few lines."""
    previous = sys.excepthook
    if getattr(previous, "of_jtrain", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, UserError | PeerError | DeviceError)
        if ours and not full_tracebacks():
            error.__traceback__ = trace = cut_traceback(trace)
        previous(kind, error, trace)
        if ours and not is_interactive():
            sys.stdout.flush()
            raise SystemExit(error.code)

    hook.of_jtrain = True  # pyright: ignore[reportFunctionMemberAccess]
    sys.excepthook = hook


def refused_platform(error: Exception) -> ConfigError | None:
    """Return the error for a JAX without devices of the platform in JAX_PLATFORMS."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    frames = traceback.extract_tb(error.__traceback__)
    if not asked or not any(frame.filename.endswith("xla_bridge.py") for frame in frames):
        return None
    reason = f" ({format_error(error).partition(': ')[2]})" if str(error) else ""
    return ConfigError(
        f"JAX_PLATFORMS={asked} asks for devices that JAX does not find here{reason}. To use the "
        f"CPU type: export JAX_PLATFORMS=cpu. For an NVIDIA GPU: pip install 'jtrain[cuda13]', "
        f"'jtrain[cuda12]' with a driver older than 580; for a TPU: pip install 'jtrain[tpu]'."
    )
