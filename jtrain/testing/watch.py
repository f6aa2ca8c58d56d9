"""Side effects of a loss: the arguments that it changes, the host generators that it uses."""

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

from jtrain.core.loss import Stateful
from jtrain.core.pytree import named_leaves
from jtrain.core.types import LossFn

# Functions whose number differs between processes, or with the number of devices.
COUNTS = ("device_count", "local_device_count", "process_count", "process_index")
HOST = [*((jax, name) for name in COUNTS), (os, "getpid")]


@dataclasses.dataclass(eq=False)
class SideEffects:
    """Side effects of recorded losses, collected over all their calls."""

    changed: set[str] = dataclasses.field(default_factory=set)
    """Leaves of arguments that a call replaced, removed or added: `batch['x']`."""
    drew_from: set[str] = dataclasses.field(default_factory=set)
    """Generators of the host that a call drew from: `numpy.random`."""
    asked: set[str] = dataclasses.field(default_factory=set)
    """Functions of `HOST` that a call asked for a number of its process."""
    shift: int = 0
    """Added to these numbers: another process would get others."""
    on_call: Callable[[], object] = lambda: None
    """Called before each trace of a loss."""

    def record(self, loss: LossFn | Stateful) -> LossFn | Stateful:
        """Return the loss with each call recorded."""
        if isinstance(loss, Stateful):
            return Stateful(self._record(loss.loss, ("params", "extra", "batch")))
        return self._record(loss, ("params", "batch"))

    def _record(self, fn: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            numpy, python = np.random.get_state(legacy=False), random.getstate()
            before = [_leaves(x) for x in args[: len(names)]]
            self.on_call()
            try:
                with contextlib.ExitStack() as stack:
                    for module, name in HOST:
                        stack.enter_context(self._watch(module, name))
                    return fn(*args)
            finally:
                after = [_leaves(x) for x in args[: len(names)]]
                for name, old, new in zip(names, before, after, strict=True):
                    leaves = sorted({**old, **new})
                    self.changed |= {
                        f"{name}[{x!r}]" for x in leaves if old.get(x) is not new.get(x)
                    }
                if not _same_state(numpy, np.random.get_state(legacy=False)):
                    self.drew_from.add("numpy.random")
                if python != random.getstate():
                    self.drew_from.add("random")

        return call

    def _watch(self, module: Any, name: str) -> Any:
        """Return a context in which calls of a function are noted, and its result is shifted."""
        function = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            self.asked.add(f"{module.__name__}.{name}()")
            return function(*args, **options) + self.shift

        return mock.patch.object(module, name, call)


def _leaves(tree: Any) -> dict[str, Any]:
    return dict(named_leaves(tree)) if jax.tree.leaves(tree) else {}


def _same_state(a: Any, b: Any) -> bool:
    return a["state"]["pos"] == b["state"]["pos"] and np.array_equal(
        a["state"]["key"], b["state"]["key"]
    )
