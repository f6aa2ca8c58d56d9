"""Losses that take one number of rows and no other."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.errors import CodeError, UserError
from jtrain.inspect.debug.source import raised_at
from jtrain.testing.cause import Cause
from jtrain.testing.splits import taken


def fails_on_half(terms: Callable[..., Any], *given: Any) -> str:
    """Return what `terms(params, extra, batch, rng)` raises for half of the rows; empty if nothing.

    `given` are its arguments for the whole batch.
    """
    params, extra, batch, rng = given
    half = taken(batch, np.arange(len(batch["mask"]) // 2))
    try:
        jax.eval_shape(terms, params, extra, half, rng)
    except Exception as error:
        if not is_of_the_loss(error):
            raise
        return raised_in(error)
    return ""


def is_of_the_loss(error: Exception) -> bool:
    """Return whether an error was raised by lines of the loss, and is none of our own refusals."""
    if isinstance(error, UserError):
        return isinstance(error, CodeError)
    return raised_at(error) is not None


def raised_in(error: Exception) -> str:
    """Return what was raised, where in the loss, and its first line."""
    if isinstance(error, CodeError) and isinstance(error.__context__, Exception):
        error = error.__context__
    at, line = raised_at(error), (str(error) or repr(error)).strip().partition("\n")[0]
    where = f" at {at}" if at else ""
    return f"{type(error).__name__}{where}: {line if line.endswith('.') else f'{line}.'}"


def fixed_rows(rows: int, fewer: int, raised: str) -> Cause:
    """Return the cause of a loss that takes `rows` rows and raises for fewer."""
    return Cause(
        "fixed number of rows",
        f"the loss takes the {rows} rows of this batch and not {fewer} of them ({raised}): a "
        f"number of rows is written into it. A microbatch and a device have fewer. Take it from "
        f"the array, `x.shape[0]`, or let reshape find it, `x.reshape(-1, ...)`.",
    )
