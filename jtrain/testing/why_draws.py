"""Causes for a loss whose sums add up only without random draws: the wrong key."""

import numpy as np

from jtrain.core.jaxpr import equations_in
from jtrain.core.loss import named_means
from jtrain.core.types import Batch
from jtrain.testing.result import Cause, compare_results
from jtrain.testing.row_sums import add_parts
from jtrain.testing.splits import hide_other_rows, make_ragged, take_rows
from jtrain.testing.trials import GRADIENT, Trials
from jtrain.testing.why_neighbours import explain_mixing

AFTER = 1000  # offset that gives rows other numbers


def explain_draws(trials: Trials) -> Cause:
    """Return what the draws of a row depend on besides the row's own key."""
    vmapped = [
        equation.invars[0].aval.dtype
        for equation in equations_in(trials.case.trace.program.jaxpr)
        if equation.primitive.name == "random_bits" and equation.invars[0].aval.shape
    ]
    if other := [str(dtype) for dtype in vmapped if "rbg" in str(dtype)]:
        return Cause(
            "vmap of another generator",
            f"jax.vmap of a draw by {other[0]} draws for all rows from the first key, so that "
            f"the draws of a row depend on the rows beside it. Draw by `jt.row_keys(rng, batch)`, "
            f"whose keys are of threefry.",
        )
    batch = trials.batch if trials.case.mask_error else make_ragged(trials.batch)
    first = add_parts(trials.rows, [batch])[0]
    names = [*named_means(trials.rows(batch).returned), GRADIENT]
    if any(trials.rows_interact(name) for name in names):
        facts = [flow.total.facts for flow in trials.flows.values()]
        kinds = ("mixed", "moved", "paired", "meets")
        return explain_mixing(next((x[kind] for kind in kinds for x in facts if kind in x), None))

    if not _renumbering_changes(trials, batch, batch["row"] >= 0):
        order = np.random.default_rng(0).permutation(len(batch["row"]))
        moved = add_parts(trials.rows, [take_rows(batch, order)])[0]
        if compare_results(moved, first).largest <= trials.close:
            return Cause(
                "key of the number of rows",
                "random draws change with how many rows the loss gets and with nothing else: the "
                "number of rows is folded into the key, or all rows share one draw of that size. "
                "Draw for each row by its key of `jt.row_keys(rng, batch)`.",
            )
        return Cause(
            "key of the position",
            "random draws stay the same when rows get other numbers: the key does not come from "
            "`row` but from the position in the batch, which a split changes. Draw for each row by "
            "its key of `jt.row_keys(rng, batch)`.",
        )
    if _follows_first_row(trials, batch):
        return Cause(
            "one draw for the batch",
            "a layer draws once for all its rows, by the key of the first row: the draws of a row "
            "depend on the layout. This is known of layers of other libraries; jtrain's own layers "
            "draw by `jt.row_keys(rng, batch)`.",
            fault=False,
        )
    return Cause(
        "key of other rows",
        "the draws of a row depend on other rows. Draw by `jt.row_keys(rng, batch)` and use each "
        "key for its own row only.",
    )


def _follows_first_row(trials: Trials, batch: Batch) -> bool:
    """Return whether a row draws by the first row's key and at most its own, and by no other.

    Rows with draws of their own are tried alone: two that are not next to the first row, so that
    the key of a neighbour is another fault.
    """
    places = np.arange(len(batch["row"]))
    if not _renumbering_changes(trials, batch, places > 0):
        return True
    if len(places) < 5 or trials.case.mask_error:
        return False
    return all(
        _renumbering_changes(trials, alone, places == 0)
        and not _renumbering_changes(trials, alone, (places > 0) & (places != place))
        for place in (2, len(places) - 2)
        for alone in [hide_other_rows(trials.batch, places[place])]
    )


def _renumbering_changes(trials: Trials, batch: Batch, chosen: np.ndarray) -> bool:
    """Return whether other numbers for the chosen rows change the sums of the batch."""
    row = np.where(chosen, batch["row"] + AFTER, batch["row"]).astype(np.int32)
    first, other = (add_parts(trials.rows, [x])[0] for x in (batch, {**batch, "row": row}))
    return compare_results(other, first).largest > trials.close
