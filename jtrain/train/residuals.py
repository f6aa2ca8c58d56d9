"""Residuals: bytes that a forward pass saves for its backward pass, by tracing alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jtrain.core.jaxpr import equations

CHECKPOINT = {"checkpoint", "remat2"}  # what `jax.checkpoint` is called in a traced function


class RematRegion(NamedTuple):
    """Region of a function under `jax.checkpoint`: recomputed in the backward pass."""

    saved_bytes: int
    """Bytes of residuals while the region is recomputed."""
    given: tuple[Any, ...]
    """Shapes and dtypes of the inputs of the region."""


def saved_residuals(fn: Callable[..., Any], first: Any, *rest: Any) -> int:
    """Return the bytes of residuals of a scalar `fn`, differentiated by its first argument.

    Residuals that are arguments themselves do not count.
    """
    return _own(lambda x, *others: jax.vjp(lambda x: fn(x, *others), x)[1], first, *rest)


def remat_regions(fn: Callable[..., Any], *args: Any) -> list[RematRegion]:
    """Return the regions of `fn(*args)` under `jax.checkpoint`; one in a loop counts once."""
    return [_part(eqn) for eqn in equations(fn, *args) if eqn.primitive.name in CHECKPOINT]


def num_bytes(of: Any) -> int:
    """Return the bytes of an array, by its shape and dtype."""
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
    """Return the bytes of the results of `fn(*args)` that are none of its arguments."""
    traced = jax.make_jaxpr(fn)(*args).jaxpr
    given = {*traced.invars, *traced.constvars}
    results = {var for var in traced.outvars if not hasattr(var, "val")}  # those have no literals
    return sum(num_bytes(var.aval) for var in results - given)
