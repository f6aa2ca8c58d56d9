"""What comes of rows in each total and weight of a loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jtrain.core.loss import LossOutput
from jtrain.core.mean import Mean
from jtrain.testing.case import LossCase
from jtrain.testing.flow import DifferentError, RowFlow, flows

NUMBERS_OF_A_ROW = {"row", "mask"}


class MeanFlow(NamedTuple):
    """What comes of rows in a mean."""

    total: RowFlow = RowFlow()
    weight: RowFlow = RowFlow()


def means(returned: LossOutput) -> dict[str, Mean]:
    """All that adds up over rows, by what it is called in a sentence."""
    is_mean = lambda x: isinstance(x, Mean)
    changes = jax.tree_util.tree_leaves_with_path(returned.extra, is_leaf=is_mean)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    terms = {f"term {i} of the loss": mean for i, mean in enumerate(returned.terms.means)}
    metrics = {f"the metric {name!r}": mean for name, mean in returned.metrics.items()}
    return {**terms, **metrics, **{f"the leaf {name(p)!r} of extra": m for p, m in changes}}


def flows_of(of: LossCase) -> Mapping[str, MeanFlow]:
    """Return what comes of rows in each mean of a loss, while it trains; nothing if it is unknown.

    Unknown where the loss takes no other number of rows, or is another program for it.
    """
    if of.halves:
        return {}
    large, small = of.trace, of.trace_of_half
    inputs = [_given(argument, path) for argument, path in large.inputs]
    try:
        found = flows(large.program, small.program, inputs)
    except DifferentError:
        return {}
    structure = jax.tree.structure(large.returned)
    named = means(jax.tree.unflatten(structure, [_Leaf(flow) for flow in found]))
    return {name: MeanFlow(mean.total.flow, mean.weight.flow) for name, mean in named.items()}


class _Leaf(NamedTuple):
    flow: RowFlow


def _given(argument: int, path: Any) -> RowFlow:
    """The flow of an argument: params, extra, batch or the key."""
    contents = argument == 2 and path[0].key not in NUMBERS_OF_A_ROW
    return RowFlow(contents=contents, drawn=argument == 3)
