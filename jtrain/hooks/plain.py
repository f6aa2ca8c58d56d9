"""A hook from a plain function, in one line."""

from collections.abc import Callable, Mapping
from typing import Any

from jtrain.loop import Hook, Stop
from jtrain.types import Metrics


def on_numbers(
    function: Callable[[int, Mapping[str, float]], Stop | None], *, every: int = 1
) -> Hook:
    """A hook that gives the numbers of each step `every`, 2 `every`, ... to `function`.

    `on_numbers(lambda step, numbers: print(step, numbers["loss"]), every=10)`
    """
    return _OnNumbers(function, every)


def on_state(function: Callable[[int, Any], Stop | None], *, every: int = 1) -> Hook:
    """A hook that gives the state after each step `every`, 2 `every`, ... to `function`.

    It must not keep the state, whose memory the next step takes: `jax.device_get` copies.
    """
    return _OnState(function, every)


class _OnNumbers(Hook):
    def __init__(self, function: Callable[[int, Mapping[str, float]], Stop | None], every: int):
        self._function, self.every = function, every

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        return self._function(step, numbers)


class _OnState(Hook):
    def __init__(self, function: Callable[[int, Any], Stop | None], every: int):
        self._function, self.every = function, every

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        return self._function(step, state)
