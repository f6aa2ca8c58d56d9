"""What a forward pass keeps for its backward pass, in bytes, by tracing; nothing is run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jtrain.core.jaxpr import equations

CHECKPOINT = {"checkpoint", "remat2"}  # what `jax.checkpoint` is called in a traced function


class RematRegion(NamedTuple):
    """A part of a function under `jax.checkpoint`: computed again for its backward pass."""

    saved_bytes: int
    """Bytes that it keeps for as long as that takes."""
    given: tuple[Any, ...]
    """Shapes and dtypes of what it is computed from."""


def saved_residuals(fn: Callable[..., Any], first: Any, *rest: Any) -> int:
    """Bytes of the residuals of `fn`, a scalar, differentiated by the first of its arguments.

    Not those that are arguments themselves.
    """
    return _own(lambda x, *others: jax.vjp(lambda x: fn(x, *others), x)[1], first, *rest)


def remat_regions(fn: Callable[..., Any], *args: Any) -> list[RematRegion]:
    """The parts of `fn(*args)` under `jax.checkpoint`; what is in a loop, once."""
    return [_part(eqn) for eqn in equations(fn, *args) if eqn.primitive.name in CHECKPOINT]


def num_bytes(of: Any) -> int:
    """Bytes of an array, by its shape and dtype."""
    return of.size * of.dtype.itemsize


def _part(eqn: Any) -> RematRegion:
    body = eqn.params["jaxpr"]
    run = jaxpr_as_fun(body if hasattr(body, "consts") else ClosedJaxpr(body, ()))
    given = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    real = [i for i, of in enumerate(given) if jnp.issubdtype(of.dtype, jnp.inexact)]

    def back(*inputs: Any) -> Any:
        def of_real(*changed: Any) -> Any:
            now = dict(zip(real, changed, strict=True))
            return run(*(now.get(i, x) for i, x in enumerate(inputs)))

        return jax.vjp(of_real, *(inputs[i] for i in real))[1]

    return RematRegion(_own(back, *given), given)


def _own(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of the results of `fn(*args)` that are none of what it was given."""
    traced = jax.make_jaxpr(fn)(*args).jaxpr
    given = {*traced.invars, *traced.constvars}
    results = {var for var in traced.outvars if not hasattr(var, "val")}  # those have no literals
    return sum(num_bytes(var.aval) for var in results - given)
