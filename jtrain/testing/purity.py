"""Purity of a loss: side effects, traces that differ between calls, the loss without `jit`."""

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import numpy as np

from jtrain.core.interpret import DifferentProgramsError, literals, pair_equations
from jtrain.core.loss import Stateful
from jtrain.core.pytree import named_leaves
from jtrain.core.types import LossFn
from jtrain.testing.causes import Cause, cause

if TYPE_CHECKING:
    from jtrain.testing.case import LossCase

# Functions whose number differs between processes, or with the number of devices.
COUNTS = ("device_count", "local_device_count", "process_count", "process_index")
HOST = [*((jax, name) for name in COUNTS), (os, "getpid")]
SEEDS = 4  # seeds of Python's `random` to try if a call drew from it


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

    def record(self, loss: LossFn | Stateful) -> LossFn | Stateful:
        """Return the loss with each call recorded."""
        if isinstance(loss, Stateful):
            return Stateful(self._record(loss.loss, ("params", "extra", "batch")))
        return self._record(loss, ("params", "batch"))

    def _record(self, fn: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        leaves_of = lambda args: {
            f"{name}[{leaf!r}]": x
            for name, tree in zip(names, args, strict=False)
            for leaf, x in (named_leaves(tree).items() if jax.tree.leaves(tree) else ())
        }

        def call(*args: Any) -> Any:
            drawn, before = _generators(), leaves_of(args)
            try:
                with contextlib.ExitStack() as stack:
                    for module, name in HOST:
                        stack.enter_context(self._watch(module, name))
                    return fn(*args)
            finally:
                after = leaves_of(args)
                names = {**before, **after}
                self.changed |= {n for n in names if before.get(n) is not after.get(n)}
                self.drew_from |= {n for n, x in _generators().items() if x != drawn[n]}

        return call

    def _watch(self, module: Any, name: str) -> Any:
        """Return a context in which calls of a function are noted, and its result is shifted."""
        function = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            self.asked.add(f"{module.__name__}.{name}()")
            return function(*args, **options) + self.shift

        return mock.patch.object(module, name, call)


def _generators() -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=False)["state"]
    return {"numpy.random": (numpy["pos"], numpy["key"].tobytes()), "random": random.getstate()}


def explain_impurity(case: "LossCase") -> Cause | None:
    """Return why a loss is not a pure function of its arguments; None if no reason is found.

    The loss is traced once more; the side effects of earlier calls are already recorded.
    """
    effects = case.side_effects
    if effects.changed:
        return cause("changes its arguments", changed=", ".join(sorted(effects.changed)))
    sources = set(effects.drew_from)
    if "random" in sources and not _depends_on_random(case):
        sources.remove("random")
    if sources:
        return cause("draws of the host", sources=" and ".join(sorted(sources)))
    if not _traces_again(case):
        return cause("not a function")
    if effects.asked and _depends_on_host(case):
        return cause("numbers of the host", asked=" and ".join(sorted(effects.asked)))
    return None


def _depends_on_host(case: "LossCase") -> bool:
    """Return whether the trace changes with the numbers of the host; a mesh of devices fails."""
    case.side_effects.shift = 1
    try:
        return not _traces_again(case)
    except Exception:
        return False
    finally:
        case.side_effects.shift = 0


def _depends_on_random(case: "LossCase") -> bool:
    """Return whether the trace changes with the seed of Python's `random`.

    Libraries draw from it without effect on the trace: beartype chooses the list items to check.
    """
    state = random.getstate()
    try:
        for seed in range(SEEDS):
            random.seed(seed)
            if not _traces_again(case):
                return True
    finally:
        random.setstate(state)
    return False


def _traces_again(case: "LossCase") -> bool:
    one, other = case.trace.program, case.traced().program
    shapes = lambda equation: [x.aval.str_short() for x in equation.outvars]
    try:
        same = all(shapes(a) == shapes(b) for _, a, b in pair_equations(one, other))
    except DifferentProgramsError:
        return False
    constants = literals(one), literals(other)
    return same and len(constants[0]) == len(constants[1]) and all(map(_same_value, *constants))


def _same_value(a: Any, b: Any) -> bool:
    if a is None or b is None or a is b:  # None for what is not a constant
        return a is b
    is_key = lambda x: jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
    a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (a, b))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
