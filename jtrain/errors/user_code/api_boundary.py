"""Public functions: their errors have short tracebacks, and end a script by their own exit code."""

import difflib
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import ParamSpec, TypeVar

from jtrain.errors import ConfigError, DeviceError, PeerError, UserError
from jtrain.errors.plain_numbers import plain_numbers
from jtrain.errors.synonyms import SYNONYMS
from jtrain.errors.tracebacks import cut_traceback, format_error, is_interactive
from jtrain.errors.user_code.user_calls import full_tracebacks

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
    """Return the message for missing or unknown arguments, with the call or the nearest names."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    if trace is None or trace.tb_next is not None:  # it was raised further inside
        return None
    if "missing" in str(error):
        parameters = inspect.signature(function).parameters.values()
        needed = ", ".join(p.name for p in parameters if p.default is p.empty)
        name, missing = function.__name__, str(error).partition(": ")[2].replace("'", "")
        return ConfigError(
            f"{name} was given no {missing}. Write jt.{name}({needed}); with a model "
            f"jt.{name}(jt.classifier(model), model, data), or jt.regression."
        )
    if "unexpected keyword argument" not in str(error):
        return None
    names = list(inspect.signature(function).parameters)
    others = {other: name for other, name in SYNONYMS.items() if name in names}
    wrong = [name for name in given if name not in names]
    near = [difflib.get_close_matches(name, [*names, *others], 1) for name in wrong]
    meant = dict.fromkeys(others.get(found[0], found[0]) for found in near if found)
    advice = f"Did you mean {_assigned(meant)}?" if all(near) else f"It has {', '.join(names)}."
    many = "s" if len(wrong) > 1 else ""
    return ConfigError(f"{function.__name__} has no argument{many} {_assigned(wrong)}. {advice}")


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
