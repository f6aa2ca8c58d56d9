"""Checks of a loss, and questions about it, by its trace: nothing is compiled or run."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.core.interpret import Equation, Interpreter, Program, equations_in
from jtrain.core.loss import LossOutput
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Params, RowsInteract
from jtrain.errors import LossError

PRODUCTS = {"dot_general", "conv_general_dilated"}


def check_split_rows(rows_interact: RowsInteract, microbatches: int, copies: bool) -> None:
    """Check that a batch is not split where the loss couples its rows.

    Raises:
        LossError: with the settings that keep them together.
    """
    if rows_interact == "batch" and (microbatches > 1 or copies):
        cut = "separate copies of the step" if copies else f"{microbatches} microbatches"
        raise LossError(
            f"the loss couples the rows of a batch, and {cut} would cut the batch. Set "
            f"microbatches=1 and a strategy that shards by name (parallel.kind=single or fsdp, or "
            f'parallel.impl=jit), or say rows_interact="slice" if the rows that one slice holds '
            f"are meant to be the group. Group norm in the place of batch norm couples nothing (a "
            f"resnet's model.norm=group); nor does precision.scaling=rows in the place of tensor."
        )


def check_weights(terms: Callable[[Params], LossOutput], params: Params) -> None:
    """Check that the weight of each term depends on the batch alone.

    Raises:
        LossError: naming the term and a parameter that its weight is computed from.
    """
    names = list(named_leaves(params))
    needs = dependence(lambda p: [mean.weight for mean in terms(p).terms.means], params)
    for number, leaves in enumerate(needs):
        if leaves:
            raise LossError(
                f"the weight of term {number} of the loss is computed from the parameter "
                f"{names[min(leaves)]!r}. A weight may depend on the batch alone: it is summed "
                f"over all microbatches and devices before anything is differentiated. Move what "
                f"depends on parameters into the total."
            )


def check_unused_params(terms: Callable[[Params], LossOutput], params: Params) -> None:
    """Check that every parameter gets a gradient.

    Raises:
        LossError: naming the parameters that no term is computed from.
    """
    names = list(named_leaves(params))
    needs = dependence(lambda p: [mean.total for mean in terms(p).terms.means], params)
    unused = sorted(set(range(len(names))).difference(*needs))
    if unused:
        some = ", ".join(repr(names[i]) for i in unused[:5])
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise LossError(
            f"the loss is not computed from the parameters {some}{more}, so they would get no "
            f"gradient. Use them, take them out of the model, or hold them in `extra`."
        )


def check_product_precision(
    terms: Callable[[Params], LossOutput], params: Params, compute: Any
) -> tuple[int, int]:
    """Check that some matrix product of the loss multiplies in `compute`, or in 8 bits.

    Raises:
        LossError: if there are some and none does: then nothing is gained by the precision.
    """
    types = product_types(lambda p: [mean.total for mean in terms(p).terms.means], params)
    narrow = [found for found in types if found == compute or found.itemsize == 1]  # or fp8
    if types and not narrow:
        raise LossError(
            f"the loss is to be computed in {jnp.dtype(compute).name}, and all of its "
            f"{len(types)} matrix products multiply {types[0].name}: something wider meets the "
            f"parameters, the inputs mostly. Cast them where they enter the model: "
            f"`x.astype(kernel.dtype)`; or set precision.kind=f32."
        )
    return len(narrow), len(types)


def dependence(fn: Callable[..., Any], *args: Any) -> list[set[int]]:
    """Return for each output leaf of `fn(*args)` the input leaves that it is computed from.

    Nothing is run. A loop is taken to run, and a cond to take any of its branches.
    """
    return input_leaves(jax.make_jaxpr(fn)(*args))


def input_leaves(program: Program) -> list[set[int]]:
    """Return for each output of a traced function the inputs that it is computed from."""
    masks = _Dependence().run(program, [1 << i for i in range(len(program.in_avals))])
    return [{i for i in range(mask.bit_length()) if mask >> i & 1} for mask in masks]


class _Dependence(Interpreter[int]):
    """Sets of inputs, as bit masks."""

    def constant(self, value: Any, aval: Any) -> int:
        return 0

    def operation(self, equation: Equation, inputs: list[int]) -> Sequence[int]:
        return [self.join(*inputs)] * len(equation.outvars)

    def join(self, *values: int) -> int:
        union = 0
        for mask in values:
            union |= mask
        return union

    def choose(self, decision: int, *values: int) -> int:
        return self.join(decision, *values)


def product_types(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the dtype that each product in `fn(*args)` multiplies. Nothing is run.

    The type is that of the wider factor; a product in a loop counts once.
    """
    found = equations_in(jax.make_jaxpr(fn)(*args))
    products = (e for e in found if e.primitive.name in PRODUCTS)
    return [jnp.result_type(*(x.aval.dtype for x in e.invars[:2])) for e in products]
