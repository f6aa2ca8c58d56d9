"""Hooks from plain functions."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from jtrain.core.loop import Hook, Stop
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.train.hooks.evaluation import Results

Observer: TypeAlias = Hook | Callable[..., Stop | None]


def to_hook(observer: Observer, *, steps_per_call: int = 1) -> Hook:
    """Return a hook unchanged, or a hook that calls a function, by its parameter names.

    `(step, numbers)`: the numbers of each step, as `on_numbers` gets them.
    `(step, state)`: the state after each call of the step, as `on_state` gets it.
    `(step, results)`: the results of each evaluation, `{"valid/loss": ...}`.

    Raises:
        ConfigError: if the observer is neither.
    """
    if isinstance(observer, Hook):
        _check_methods(observer)
        return observer
    if callable(observer) and not isinstance(observer, type):
        match _names(observer):
            case ["step", "numbers"]:
                return on_numbers(observer)
            case ["step", "state"]:
                return on_state(observer, every=steps_per_call)
            case ["step", "results"]:
                return on_results(observer)
    name = getattr(observer, "__name__", type(observer).__name__)
    raise ConfigError(
        f"{name} is not a hook: it is neither a jt.Hook nor a function of (step, numbers), (step, "
        f"state) or (step, results), by these names. Write def look(step, numbers): ..."
    )


def _check_methods(hook: Hook) -> None:
    """Raise ConfigError if a method of a hook is never called, or none is."""
    names = [name for name in dir(type(hook)) if name.startswith("on_")]
    called = ("on_numbers", "on_state", "on_results")
    unknown = [name for name in names if name not in called]
    if unknown or not any(getattr(type(hook), n, None) != getattr(Hook, n, None) for n in called):
        found = f"{unknown[0]} is never called" if unknown else "it has no method"
        near = did_you_mean(unknown[0], called) if unknown else ""
        raise ConfigError(
            f"{type(hook).__name__}: {found}; a hook has {', '.join(called)}{near}. Write def "
            f"on_numbers(self, step, numbers): ..."
        )


def _names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def on_numbers(function: Callable[[int, dict[str, float]], Stop | None], *, every: int = 1) -> Hook:
    """Return a hook that calls `function` with the numbers of steps `every`, 2 `every`, ...

    `on_numbers(lambda step, numbers: print(step, numbers["loss"]), every=10)`
    """
    return _OnNumbers(function, every)


def on_state(function: Callable[[int, Any], Stop | None], *, every: int = 1) -> Hook:
    """Return a hook that calls `function` with the state after steps `every`, 2 `every`, ...

    `function` must not keep the state, whose memory the next step reuses; `jax.device_get` copies.
    """
    return _OnState(function, every)


def on_results(function: Callable[[int, dict[str, float]], Stop | None]) -> Hook:
    """Return a hook that calls `function` with each evaluation's results, `{"valid/loss": ...}`."""
    return _OnResults(function)


class _FunctionHook(Hook):
    def __init__(self, function: Callable[[int, Any], Stop | None], every: int = 1):
        self._function, self.every = function, every


class _OnNumbers(_FunctionHook):
    def on_numbers(self, step: int, numbers: dict[str, float]) -> Stop | None:
        return self._function(step, numbers)


class _OnState(_FunctionHook):
    def on_state(self, step: int, state: Any) -> Stop | None:
        return self._function(step, state)


class _OnResults(_FunctionHook):
    def on_results(self, step: int, name: str, results: Results) -> Stop | None:
        return self._function(step, {f"{name}/{key}": x for key, x in results[step].items()})
