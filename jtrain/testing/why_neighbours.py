"""What is wrong in a mean to which a row adds another amount beside other rows."""

from collections.abc import Mapping

from jtrain.testing.cause import Cause
from jtrain.testing.flow import RowCoupling
from jtrain.testing.row_flow import MeanFlow
from jtrain.testing.trials import Trials

WHOLE = 'or say couples="batch" and never split the batch'


def cause_of_neighbours(name: str, trials: Trials) -> Cause:
    """Return by which operation rows meet, read off the trace: that they do is known."""
    flow = trials.flows.get(name, MeanFlow())
    facts = {**flow.weight.facts, **flow.total.facts}
    facts = {kind: meeting for kind, meeting in facts.items() if meeting.contents}
    if mixed := facts.get("mixed"):
        return mixed_by_draw(mixed)
    if ranked := facts.get("ranked"):
        return Cause(
            "rows are ranked",
            f"{name} does not add up, for rows compete with those that are beside them for places "
            f"({ranked.told}): who is chosen depends on the split. Choose within a row, {WHOLE}.",
        )
    if name.startswith("the metric"):
        return function_of_sums(name, _first(facts, "function", "meets", "paired"), metric=True)
    if facts.get("branch") and not {"meets", "paired", "function"} & facts.keys():
        return branch_on_batch(name, facts["branch"])
    if facts.get("function") and not {"meets", "paired"} & facts.keys():
        return function_of_sums(name, facts["function"], metric=False)
    where = _first(facts, "paired", "meets", "moved")
    at = f" ({where.told})" if where else ""
    if "meets" in flow.weight.facts and "paired" not in facts and trials.weight_meets(name):
        return Cause(
            "weights of the batch",
            f"the weight that a row has in {name} depends on the rows beside it{at}: weights by "
            f"how often a class or a length occurs in the batch. Compute them from the whole data "
            f"set and give each row its own, {WHOLE}.",
        )
    return Cause(
        "batch statistic",
        f"what a row adds to {name} depends on the rows beside it{at}, as in batch norm or a "
        f"contrastive loss. Take the statistic within a row (layer norm, group norm), {WHOLE}.",
    )


def _first(facts: Mapping[str, RowCoupling], *kinds: str) -> RowCoupling | None:
    return next((facts[kind] for kind in kinds if kind in facts), None)


def mixed_by_draw(where: RowCoupling | None) -> Cause:
    """Rows that meet by what is drawn: mixup, negatives."""
    at = f" ({where.told})" if where else ""
    return Cause(
        "rows mixed by a draw",
        f"what a row adds depends on rows beside it that are drawn{at}: mixup, or negatives from "
        f"the batch. Mix where the data is read, within a row, {WHOLE}.",
    )


def function_of_sums(name: str, where: RowCoupling | None, *, metric: bool) -> Cause:
    """A root, a ratio or a maximum of what was summed over the rows at hand."""
    at = f" ({where.told})" if where else ""
    mend = (
        "Return each sum as a metric of its own (hits, guesses; squares) and divide where you read "
        "them: a Mean adds up, its root or ratio does not."
        if metric
        else f"Take the function of each row's value, {WHOLE}."
    )
    return Cause(
        "function of a sum",
        f"{name} is a function of what was summed over the rows at hand{at}, and no sum itself: "
        f"that of two halves is not that of all. {mend}",
    )


def branch_on_batch(name: str, where: RowCoupling) -> Cause:
    """A choice by a sum over the rows at hand."""
    return Cause(
        "branch on the batch",
        f"{name} takes one of two ways by what was summed over the rows at hand ({where.told}): "
        f"parts of a batch go another way than the whole. Decide for each row, or by what the step "
        f"before gave, held in `extra`.",
    )
