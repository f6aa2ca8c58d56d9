"""Row flow of each total and weight of a loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jtrain.core.loss import named_means
from jtrain.testing.case import LossCase
from jtrain.testing.flow import DifferentError, RowFlow, trace_flows

NUMBERS_OF_A_ROW = {"row", "mask"}


class MeanFlow(NamedTuple):
    """Row flow of the total and the weight of a mean."""

    total: RowFlow = RowFlow()
    weight: RowFlow = RowFlow()


def trace_mean_flows(case: LossCase) -> Mapping[str, MeanFlow]:
    """Return the row flow of each mean of a loss in training; empty if unknown.

    The flow is unknown if the loss takes only one number of rows, or traces to a different program
    for another number.
    """
    if case.half_error:
        return {}
    large, small = case.trace, case.trace_of_half
    inputs = [_input_flow(argument, path) for argument, path in large.inputs]
    try:
        found = trace_flows(large.program, small.program, inputs)
    except DifferentError:
        return {}
    structure = jax.tree.structure(large.returned)
    by_name = named_means(jax.tree.unflatten(structure, [_Leaf(flow) for flow in found]))
    return {name: MeanFlow(mean.total.flow, mean.weight.flow) for name, mean in by_name.items()}


class _Leaf(NamedTuple):
    flow: RowFlow


def _input_flow(argument: int, path: Any) -> RowFlow:
    """Return the flow of an input, from its argument: params 0, extra 1, batch 2, rng 3."""
    contents = argument == 2 and path[0].key not in NUMBERS_OF_A_ROW
    return RowFlow(contents=contents, drawn=argument == 3)
