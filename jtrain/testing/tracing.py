"""Errors that a loss raises while it is traced, in words."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jtrain.debug.source import raised_at
from jtrain.errors import LossError, UserError
from jtrain.testing.cause import Cause
from jtrain.testing.splits import taken
from jtrain.types import Batch

_ASKS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def explained(batch: Batch) -> Iterator[None]:
    """Turn what a loss raises while it is traced for `batch` into a `LossError`.

    Raises:
        LossError: with the line of the loss and what to write in its place.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise LossError(_sentence(error, batch)) from error


def fails_on_half(terms: Callable[..., Any], *given: Any) -> str:
    """Return what `terms(params, extra, batch, rng)` raises for half of the rows; empty if nothing.

    `given` are its arguments for the whole batch.
    """
    params, extra, batch, rng = given
    half = taken(batch, np.arange(len(batch["mask"]) // 2))
    try:
        jax.eval_shape(terms, params, extra, half, rng)
    except UserError:
        raise
    except Exception as error:
        return raised_in(error)
    return ""


def raised_in(error: Exception) -> str:
    """Return what was raised, where in the loss, and its first line."""
    return f"{type(error).__name__}{_at(error)}: {_first_line(error)}"


def fixed_rows(rows: int, fewer: int, raised: str) -> Cause:
    """Return the cause of a loss that takes `rows` rows and raises for fewer."""
    return Cause(
        "fixed number of rows",
        f"the loss takes the {rows} rows of this batch and not {fewer} of them ({raised}): a "
        f"number of rows is written into it. A microbatch and a device have fewer. Take it from "
        f"the array, `x.shape[0]`, or let reshape find it, `x.reshape(-1, ...)`.",
    )


def _sentence(error: Exception, batch: Batch) -> str:
    at = _at(error)
    if isinstance(error, _ASKS) or "concrete values" in str(error):
        return (
            f"the loss asks for the value of an array{at}, by {_asked(error)}: under jit there are "
            f"no values yet. Keep to jax.numpy: jnp.where or jax.lax.cond in the place of `if`, "
            f"the array itself in the place of float(), jnp in the place of np."
        )
    if isinstance(error, NameError) and (axis := re.search(r"axis name:? '?(\w+)", str(error))):
        return (
            f"the loss sums over the axis {axis[1]!r} of devices by itself{at} (psum, pmean, "
            f"axis_index). It is called for some rows and returns their sums, and the step adds "
            f"them up over devices: return `jt.Mean.of(values_by_row, batch['mask'])` without it."
        )
    if isinstance(error, KeyError) and error.args and error.args[0] not in batch:
        return (
            f"the loss asks a dict for {error.args[0]!r}{at}, which is not there. The batch has "
            f"{', '.join(sorted(batch))}: use one of these names, or give the data that name."
        )
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return (
            f"the loss uses an array of another trace{at}, kept from an earlier call in a global "
            f"or an attribute. Return what you need as a metric, and hold what changes in `extra`."
        )
    shapes = {name: np.shape(array) for name, array in batch.items()}
    return (
        f"the loss raises {type(error).__name__}{at}: {_first_line(error)} It was called as "
        f"loss(params, batch, rng) with a batch of {shapes}; mend that line."
    )


def _asked(error: Exception) -> str:
    named = re.search(r"with the `(\w+)` function|[Tt]he (\w+)\(\) method", str(error))
    if named and not named[0].startswith("The __"):
        return f"{named[1] or named[2]}()"
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "if, while, and, or, or bool()"
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "numpy"
    return "int(), an index or a shape"


def _first_line(error: Exception) -> str:
    line = (str(error) or repr(error)).strip().partition("\n")[0]
    return line if line.endswith(".") else f"{line}."


def _at(error: Exception) -> str:
    line = raised_at(error)
    return f" at {line}" if line else ""
