"""Causes for a loss whose sums add up only without random draws: the wrong key."""

from collections.abc import Callable

import numpy as np

from jtrain.testing.result import Cause, compare_results
from jtrain.testing.row_flow import named_means
from jtrain.testing.row_sums import add_parts
from jtrain.testing.splits import make_ragged, take_rows
from jtrain.testing.trials import GRADIENT, Trials
from jtrain.testing.why_neighbours import explain_mixing

AFTER = 1000  # offset that gives rows other numbers


def explain_draws(trials: Trials) -> Cause:
    """Return what the draws of a row depend on besides the row's own key."""
    batch = trials.batch if trials.case.mask_error else make_ragged(trials.batch)
    first = add_parts(trials.rows, [batch])[0]
    names = [*named_means(trials.rows(batch).returned), GRADIENT]
    if any(trials.rows_interact(name) for name in names):
        facts = [flow.total.facts for flow in trials.flows.values()]
        kinds = ("mixed", "moved", "paired", "meets")
        return explain_mixing(next((x[kind] for kind in kinds for x in facts if kind in x), None))

    def changes(renumber: Callable[[np.ndarray], np.ndarray]) -> bool:
        other = {**batch, "row": renumber(batch["row"]).astype(np.int32)}
        return compare_results(add_parts(trials.rows, [other])[0], first).largest > trials.close

    not_first = np.arange(len(batch["row"])) > 0
    if not changes(lambda row: row + AFTER):
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
    if not changes(lambda row: np.where(not_first, row + AFTER, row)):
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
