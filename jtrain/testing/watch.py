"""Side effects of a loss: the arguments that it changes, the host generators that it uses."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.core.loss import Stateful
from jtrain.core.pytree import named_leaves
from jtrain.core.types import LossFn


@dataclasses.dataclass(eq=False)
class SideEffects:
    """Side effects of recorded losses, collected over all their calls."""

    changed: set[str] = dataclasses.field(default_factory=set)
    """Leaves of arguments that a call replaced, removed or added: `batch['x']`."""
    drew_from: set[str] = dataclasses.field(default_factory=set)
    """Generators of the host that a call drew from: `numpy.random`."""

    def record(self, loss: LossFn | Stateful) -> LossFn | Stateful:
        """Return the loss with each call recorded."""
        if isinstance(loss, Stateful):
            return Stateful(self._record(loss.loss, ("params", "extra", "batch")))
        return self._record(loss, ("params", "batch"))

    def _record(self, fn: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            numpy, python = np.random.get_state(legacy=False), random.getstate()
            before = [_leaves(x) for x in args[: len(names)]]
            try:
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


def _leaves(tree: Any) -> dict[str, Any]:
    return dict(named_leaves(tree)) if jax.tree.leaves(tree) else {}


def _same_state(a: Any, b: Any) -> bool:
    return a["state"]["pos"] == b["state"]["pos"] and np.array_equal(
        a["state"]["key"], b["state"]["key"]
    )
