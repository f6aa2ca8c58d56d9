"""Losses that accept only one number of rows."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.errors import CodeError, UserError
from jtrain.inspect.debug.source import find_raise
from jtrain.testing.result import Cause
from jtrain.testing.splits import take_rows


def describe_half_error(terms: Callable[..., Any], *args: Any) -> str:
    """Return the error of `terms(params, extra, batch, rng)` for half of the rows; empty if none.

    `args` are the arguments for the full batch.
    """
    params, extra, batch, rng = args
    half = take_rows(batch, np.arange(len(batch["mask"]) // 2))
    try:
        jax.eval_shape(terms, params, extra, half, rng)
    except Exception as error:
        if not is_raised_by_loss(error):
            raise
        return describe_error(error)
    return ""


def is_raised_by_loss(error: Exception) -> bool:
    """Return whether an error comes from code of the loss and not from jtrain's own checks."""
    if isinstance(error, UserError):
        return isinstance(error, CodeError)
    return find_raise(error) is not None


def describe_error(error: Exception) -> str:
    """Return the type of an error, its line in the loss and the first line of its message."""
    if isinstance(error, CodeError) and isinstance(error.__context__, Exception):
        error = error.__context__
    at, line = find_raise(error), (str(error) or repr(error)).strip().partition("\n")[0]
    where = f" at {at}" if at else ""
    return f"{type(error).__name__}{where}: {line if line.endswith('.') else f'{line}.'}"


def explain_fixed_rows(rows: int, fewer: int, raised: str) -> Cause:
    """Return the cause of a failure in a loss that takes `rows` rows and raises for fewer."""
    return Cause(
        "fixed number of rows",
        f"the loss takes the {rows} rows of this batch and not {fewer} of them ({raised}): a "
        f"number of rows is written into it. A microbatch and a device have fewer rows. Take the "
        f"number from the array, `x.shape[0]`, or let reshape infer it, `x.reshape(-1, ...)`.",
    )
