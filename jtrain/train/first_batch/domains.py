"""Values of a batch for which a loss is not defined: labels that are no probabilities."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.errors import DataError
from jtrain.train.first_batch.index_uses import IndexUses

NEAR = 1e-2  # how far the sum of a distribution may be off: 256 chances in bfloat16


class OutsideValue(NamedTuple):
    """First row of a batch whose values are outside of the domain of the loss."""

    leaf: str  # an array that the values are computed from
    domain: str
    row: int  # of the full batch
    value: float  # outside, or the sum of a row that is no distribution
    low: float  # of all values
    high: float


def find_outside(
    uses: IndexUses, batch: Mapping[str, np.ndarray], rows: int
) -> OutsideValue | None:
    """Return the first value in an unmasked row that a loss is not defined for.

    Args:
        batch: arrays with `row` and `mask`; the rows of this process.
        rows: rows of the traced batch.
    """
    real = np.flatnonzero(batch["mask"])
    if not uses.domains or not real.size:
        return None
    rows_of = np.resize(real, rows)
    filled = {name: array[rows_of] for name, array in batch.items()}
    for use, values in zip(uses.domains, uses.marked(filled), strict=True):
        wide = np.asarray(values, np.float64)
        most = np.inf if use.domain == "weights of classes" else 1 + NEAR
        wrong, shown = ~((wide >= 0) & (wide <= most)), wide
        if use.domain == "distributions" and not wrong.any():
            shown = wide.sum(-1)
            wrong = abs(shown - 1) > NEAR
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            row = int(batch["row"][rows_of[at[0]]]) if len(wide) == rows else 0
            leaf = min(use.leaves - {"mask", "row", "weight"}, default=min(use.leaves))
            return OutsideValue(
                leaf, use.domain, row, float(shown[at]), float(wide.min()), float(wide.max())
            )
    return None


def outside_error(found: OutsideValue, what: str, origin: Sequence[int] = ()) -> DataError:
    """Return the error for a value that the loss is not defined for; arguments as for labels."""
    leaf, low, high = found.leaf, found.low, found.high
    row = f"row {found.row} of {what}"
    if len(origin):
        row += f" (row {origin[found.row]} of the data)"
    if found.domain == "probabilities":
        must, advice = "in 0 .. 1", f"{leaf} / {high:g}"
        if low == 1 and high == 2:
            advice = f"{leaf} - 1"
        elif low < 0:
            advice = f"{leaf} > 0"
    else:
        must = "0 or more" + (", 1 in sum" if found.domain == "distributions" else "")
        advice = f"{leaf} / {leaf}.sum(-1, keepdims=True)"
        if low < 0:
            advice = f"jax.nn.softmax({leaf}) of logits"
    if np.isnan(found.value) or found.value == 0:  # no factor makes a distribution of it
        advice = f"weight=({leaf} >= 0).any(-1) & ({leaf}.sum(-1) > 0)"
        if found.domain == "probabilities":
            advice = f"weight=({leaf} >= 0)"
    holds = f"{found.value:g}" + (" in sum" if low >= 0 and found.domain == "distributions" else "")
    return DataError(
        f"the loss takes {found.domain} from `{leaf}`, {must}, and {row} holds {holds}: the loss "
        f"of it is that of no distribution. Give `{advice}`, or hide the row by its mask. "
        f"checks.first_batch=false (check_batch=False in a call) turns this check off."
    )
