"""Causes for a mean in which rows interact."""

from collections.abc import Mapping

from jtrain.testing.flow import RowCoupling
from jtrain.testing.result import Cause
from jtrain.testing.row_flow import MeanFlow
from jtrain.testing.trials import Trials

UNSPLIT = 'or set couples="batch" and never split the batch'


def explain_coupling(name: str, trials: Trials) -> Cause:
    """Return the operation by which rows interact, from the trace, once they are known to."""
    flow = trials.flows.get(name, MeanFlow())
    facts = {**flow.weight.facts, **flow.total.facts}
    facts = {kind: coupling for kind, coupling in facts.items() if coupling.contents}
    if mixed := facts.get("mixed"):
        return explain_mixing(mixed)
    if ranked := facts.get("ranked"):
        return Cause(
            "rows are ranked",
            f"{name} does not add up, because rows are ranked against the other rows of the batch "
            f"({ranked.description}): the selected rows depend on the split. Select within a row, "
            f"{UNSPLIT}.",
        )
    if name.startswith("the metric"):
        return explain_function_of_sums(
            name, _first(facts, "function", "meets", "paired"), metric=True
        )
    if facts.get("branch") and not {"meets", "paired", "function"} & facts.keys():
        return explain_branch(name, facts["branch"])
    if facts.get("function") and not {"meets", "paired"} & facts.keys():
        return explain_function_of_sums(name, facts["function"], metric=False)
    where = _first(facts, "paired", "meets", "moved")
    at = f" ({where.description})" if where else ""
    if "meets" in flow.weight.facts and "paired" not in facts and trials.weights_interact(name):
        return Cause(
            "weights of the batch",
            f"the weight of a row in {name} depends on other rows of the batch{at}: weights by how "
            f"often a class or a length occurs in the batch. Compute the weights from the whole "
            f"data set and give each row its own, {UNSPLIT}.",
        )
    return Cause(
        "batch statistic",
        f"the value that a row adds to {name} depends on other rows of the batch{at}, as in batch "
        f"norm or a contrastive loss. Take the statistic within a row (layer norm, group norm), "
        f"{UNSPLIT}.",
    )


def _first(facts: Mapping[str, RowCoupling], *kinds: str) -> RowCoupling | None:
    return next((facts[kind] for kind in kinds if kind in facts), None)


def explain_mixing(where: RowCoupling | None) -> Cause:
    """Return the cause for rows that a random draw combines: mixup, negatives."""
    at = f" ({where.description})" if where else ""
    return Cause(
        "rows mixed by a draw",
        f"the value that a row adds depends on randomly drawn other rows{at}: mixup, or negatives "
        f"from the batch. Mix rows when the data is read, or within a row, {UNSPLIT}.",
    )


def explain_function_of_sums(name: str, where: RowCoupling | None, *, metric: bool) -> Cause:
    """Return the cause for a root, a ratio or a maximum of sums over the rows of a slice."""
    at = f" ({where.description})" if where else ""
    advice = (
        "Return each sum as a metric of its own (hits, guesses; squares) and divide when you read "
        "the metrics: a Mean adds up, its root or ratio does not."
        if metric
        else f"Take the function of each row's value, {UNSPLIT}."
    )
    return Cause(
        "function of a sum",
        f"{name} is a function of a sum over the rows of a slice{at}, and not a sum: the values of "
        f"two halves do not give the value of the whole. {advice}",
    )


def explain_branch(name: str, where: RowCoupling) -> Cause:
    """Return the cause for a branch on a sum over the rows of a slice."""
    return Cause(
        "branch on the batch",
        f"{name} branches on a sum over the rows of a slice ({where.description}): parts of a "
        f"batch may take another branch than the whole. Decide for each row, or by a result of the "
        f"previous step, held in `extra`.",
    )
