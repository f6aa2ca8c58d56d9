"""Whose key is drawn from, where a loss adds up as soon as nothing random is drawn."""

from collections.abc import Callable

import numpy as np

from jtrain.testing.cause import Cause
from jtrain.testing.result import distances
from jtrain.testing.row_flow import means
from jtrain.testing.row_sums import together
from jtrain.testing.splits import ragged, taken
from jtrain.testing.trials import GRADIENT, Trials
from jtrain.testing.why_neighbours import mixed_by_draw

AFTER = 1000  # what is added to the numbers of rows: any others do


def cause_of_draws(trials: Trials) -> Cause:
    """Return what the draws of a row depend on besides its own key."""
    batch = trials.batch if trials.of.masks else ragged(trials.batch)
    first = together(trials.rows, [batch])[0]
    names = [*means(trials.rows(batch).returned), GRADIENT]
    if any(trials.meets(name) for name in names):
        facts = [flow.total.facts for flow in trials.flows.values()]
        kinds = ("mixed", "moved", "paired", "meets")
        return mixed_by_draw(next((x[kind] for kind in kinds for x in facts if kind in x), None))

    def changes(which: Callable[[np.ndarray], np.ndarray]) -> bool:
        other = {**batch, "row": which(batch["row"]).astype(np.int32)}
        return distances(together(trials.rows, [other])[0], first).largest > trials.close

    beside = np.arange(len(batch["row"])) > 0
    if not changes(lambda row: row + AFTER):
        order = np.random.default_rng(0).permutation(len(batch["row"]))
        moved = together(trials.rows, [taken(batch, order)])[0]
        if distances(moved, first).largest <= trials.close:
            return Cause(
                "key of the number of rows",
                "what is drawn changes with how many rows the loss sees and with nothing else: "
                "their number is folded into the key, or all rows share one draw of that size. "
                "Draw for each row by its key of `jt.row_keys(rng, batch)`.",
            )
        return Cause(
            "key of the position",
            "what is drawn stays the same when rows get other numbers: its key does not come from "
            "`row` but from the place in what the loss sees, which a split changes. Draw for each "
            "row by its key of `jt.row_keys(rng, batch)`.",
        )
    if not changes(lambda row: np.where(beside, row + AFTER, row)):
        return Cause(
            "one draw for the batch",
            "a layer draws once for all rows that it sees, by the key of the first of them: what a "
            "row gets depends on the layout. Known of layers of other libraries; jtrain's own draw "
            "by `jt.row_keys(rng, batch)`.",
            fault=False,
        )
    return Cause(
        "key of other rows",
        "what a row draws depends on the rows beside it. Draw by `jt.row_keys(rng, batch)` and use "
        "each key for its row alone.",
    )
