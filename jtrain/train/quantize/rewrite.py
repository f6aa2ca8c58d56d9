"""Rewriting of a traced program: its products with chosen parameters become others."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.core.jaxpr import inner_jaxprs, scan_sizes
from jtrain.train.quantize.products import Contraction

# (activations, weight, dims that are summed) -> the product, free dims of both
Product: TypeAlias = Callable[[Array, Array, Contraction], Array]

# What gives a parameter in another type, layout or part.
_VIEWS = {
    *("convert_element_type", "transpose", "reshape", "squeeze", "copy", "copy_p", "slice"),
    *("dynamic_slice", "split", "sharding_constraint", "reduce_precision", "name", "stop_gradient"),
}
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map"),
    "custom_partitioning",
}


class Rewritten(NamedTuple):
    """A program and what became of the products of each leaf."""

    jaxpr: Any
    plain: frozenset[int]  # leaves with a product that can be replaced, chosen or not
    kept: Mapping[int, str]  # leaf: a use of it that cannot


def rewrite_products(
    jaxpr: Any, leaves: int, chosen: Collection[int], product: Product
) -> Rewritten:
    """Replace each product of an activation and a chosen leaf.

    Looks through casts, layouts, jit, remat, scans, conditions and shard_map. A product of two
    leaves, with dims of a batch, or within a custom derivative or a while_loop is not replaced.

    Args:
        jaxpr: the program, whose first `leaves` inputs are the leaves.
        chosen: the leaves whose products are replaced.
    """
    walk = _Walk(product, chosen)
    made, _ = walk.program(jaxpr, [i if i < leaves else None for i in range(len(jaxpr.invars))])
    return Rewritten(made, frozenset(walk.plain), walk.kept)


class _Walk:
    """One pass over a program and those inside it."""

    def __init__(self, product: Product, chosen: Collection[int]):
        self._product, self._chosen = product, chosen
        self.plain: set[int] = set()
        self.kept: dict[int, str] = {}

    def program(self, jaxpr: Any, inputs: list[int | None]) -> tuple[Any, list[int | None]]:
        """Return the rewritten program, and which leaf each output is a view of."""
        views = {v: i for v, i in zip(jaxpr.invars, inputs, strict=True) if i is not None}
        read = lambda atom: None if hasattr(atom, "val") else views.get(atom)
        equations = []
        for eqn in jaxpr.eqns:
            leaves = [read(x) for x in eqn.invars]
            outputs: list[int | None] = [None] * len(eqn.outvars)
            if any(leaf is not None for leaf in leaves):
                eqn, outputs = self._equation(eqn, leaves)
            equations.append(eqn)
            pairs = zip(eqn.outvars, outputs, strict=True)
            views |= {v: leaf for v, leaf in pairs if leaf is not None}
        return jaxpr.replace(eqns=equations), [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, leaves: list[int | None]) -> tuple[Any, list[int | None]]:
        name = eqn.primitive.name
        nothing: list[int | None] = [None] * len(eqn.outvars)
        if name == "dot_general":
            return self._dot(eqn, leaves), nothing
        if name == "conv_general_dilated":
            self._keep(leaves, "a convolution")
        elif name == "optimization_barrier":
            return eqn, leaves
        elif name in _VIEWS:
            return eqn, [leaves[0]] * len(eqn.outvars)
        elif name in _CALLS:
            return self._inside(eqn, leaves)
        elif name == "scan":
            consts, carry = scan_sizes(eqn, inner_jaxprs(eqn)[0])
            steady = [x if not consts <= i < consts + carry else None for i, x in enumerate(leaves)]
            return self._inside(eqn, steady)[0], nothing
        elif name == "cond":
            return self._inside(eqn, leaves[1:])[0], nothing
        elif inner_jaxprs(eqn):
            self._keep(leaves, f"within {name}")
        return eqn, nothing

    def _inside(self, eqn: Any, leaves: list[int | None]) -> tuple[Any, list[int | None]]:
        """Return an equation with its programs rewritten."""
        outputs: list[int | None] = []

        def rewrite(value: Any) -> Any:
            nonlocal outputs
            closed = hasattr(value, "consts") and getattr(value, "jaxpr", value) is not value
            if closed:  # over its constants; jax 0.12 has one class for both
                return value.replace(jaxpr=rewrite(value.jaxpr))
            if hasattr(value, "eqns"):
                made, outputs = self.program(value, leaves)
                return made
            return tuple(map(rewrite, value)) if type(value) is tuple else value

        params = {name: rewrite(value) for name, value in eqn.params.items()}
        return eqn.replace(params=params), outputs

    def _dot(self, eqn: Any, leaves: list[int | None]) -> Any:
        (contracted, batch), (left, right) = eqn.params["dimension_numbers"], leaves[:2]
        if left is not None and right is not None:
            self._keep(leaves, "a product of two parameters")
            return eqn
        if any(batch):
            self._keep(leaves, "a product with dims of a batch")
            return eqn
        if not all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars):
            self._keep(leaves, "a product with integers")
            return eqn
        leaf, out = (right if right is not None else left), eqn.outvars[0].aval
        assert leaf is not None
        self.plain.add(leaf)
        if leaf not in self._chosen:
            return eqn

        def multiply(a: Array, b: Array) -> Array:
            if right is not None:
                y = self._product(a, b, Contraction(*contracted))
            else:
                y = self._product(b, a, Contraction(*contracted[::-1]))
                moved = b.ndim - len(contracted[1])
                y = jnp.moveaxis(y, range(moved), range(y.ndim - moved, y.ndim))
            return y.astype(out.dtype)

        made = jax.make_jaxpr(jax.jit(multiply))(*(_like(x.aval) for x in eqn.invars)).eqns[-1]
        return eqn.replace(primitive=made.primitive, params=made.params, effects=made.effects)

    def _keep(self, leaves: list[int | None], why: str) -> None:
        self.kept |= {leaf: why for leaf in leaves if leaf is not None}


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    varying = getattr(aval, "vma", None)
    more = {"vma": varying} if varying else {}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **more)
