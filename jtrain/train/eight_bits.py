"""Losses with their linear layers in 8 bits: a traced program whose products become others."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.config.precision import FP8, Precision
from jtrain.core.interpret import (
    PROGRAMS,
    Equation,
    Interpreter,
    as_function,
    inner_programs,
    place_of,
    replace_equation,
    replace_equations,
)
from jtrain.core.loss import Stateful
from jtrain.core.pytree import named_leaves
from jtrain.core.types import LossFn, Params, RowsInteract
from jtrain.errors import ConfigError
from jtrain.optim.groups import check_pattern, matches, nearest
from jtrain.parallel.devices import Device, compute_capability
from jtrain.train.eight_bit_products import Contraction, fp8_product

# (activations, weight, dims that are summed) -> the product, free dims of both
Product: TypeAlias = Callable[[Array, Array, Contraction], Array]


@dataclasses.dataclass(frozen=True)
class QuantizedFunction:
    """A function of parameters whose products with some leaves are computed by `product`.

    Any function will do: it is traced, and each product of an activation and a chosen leaf is
    replaced, behind casts and layouts, in jit, remat, scan, cond and shard_map. A product of two
    leaves, with dims of a batch, or within a custom derivative or a while_loop is not replaced.
    """

    function: Callable[..., Any]
    product: Product
    products: Sequence[str]  # patterns of leaves
    exclude: Sequence[str]  # patterns of leaves that stay as they are

    def __call__(self, params: Params, *rest: Any) -> Any:
        """Call the function.

        Raises:
            ConfigError: if a pattern matches no leaf, or none that has a matrix product.
        """
        closed, shape = jax.make_jaxpr(self.function, return_shape=True)(params, *rest)
        names = list(named_leaves(params))
        chosen = {i for i, name in enumerate(names) if self._chooses(name)}
        found = _Products(self.product, chosen)
        leaves = [i if i < len(names) else None for i in range(len(closed.in_avals))]
        found.run(closed, leaves)
        self._check(names, chosen, found)
        program = replace_equations(closed, found.replacements)
        flat = as_function(program)(*jax.tree.leaves((params, *rest)))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    def _chooses(self, name: str) -> bool:
        pick = lambda patterns: any(matches(name, pattern) for pattern in patterns)
        return pick(self.products) and not pick(self.exclude)

    def _check(self, names: Sequence[str], chosen: set[int], found: "_Products") -> None:
        for i, pattern in enumerate(self.exclude):
            check_pattern(f"precision.exclude[{i}]", pattern, names)
        for i, pattern in enumerate(self.products):
            leaves = {n for n, name in enumerate(names) if matches(name, pattern)}
            if not leaves & chosen & found.plain:
                where = f"precision.products[{i}] is {pattern!r}"
                near = nearest(pattern, [names[leaf] for leaf in sorted(found.plain)])
                advice = (
                    f"Nearest that do: {', '.join(near)}. Write one, or a pattern of several."
                    if near
                    else "No leaf does: set precision.kind=bf16."
                )
                raise ConfigError(f"{where}: {self._fault(names, leaves, chosen, found)}. {advice}")

    def _fault(
        self, names: Sequence[str], leaves: set[int], chosen: set[int], found: "_Products"
    ) -> str:
        some = ", ".join(names[leaf] for leaf in sorted(leaves)[:3]) or "none"
        if leaves and not leaves & chosen:
            return f"precision.exclude leaves out all that it matches ({some})"
        why = next((f" ({found.kept[leaf]})" for leaf in sorted(leaves) if leaf in found.kept), "")
        return f"no leaf that it matches ({some}) multiplies activations in a plain product{why}"


def quantize_loss(
    loss: LossFn | Stateful, product: Product, *, products: Sequence[str], exclude: Sequence[str]
) -> LossFn | Stateful:
    """Return the loss with its products in 8 bits."""
    inner = loss.loss if isinstance(loss, Stateful) else loss
    made = QuantizedFunction(inner, product, tuple(products), tuple(exclude))
    return Stateful(made) if isinstance(loss, Stateful) else made


# What gives a parameter in another type, layout or part.
_VIEWS = {
    *("convert_element_type", "transpose", "reshape", "squeeze", "copy", "copy_p", "slice"),
    *("dynamic_slice", "split", "sharding_constraint", "reduce_precision", "name", "stop_gradient"),
}


class _Products(Interpreter[int | None]):
    """Values that are views of a leaf, and what becomes of the products with them."""

    enters = PROGRAMS - {"while", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}

    def __init__(self, product: Product, chosen: Collection[int]):
        self._product, self._chosen = product, chosen
        self.replacements: dict[tuple[int, ...], Equation] = {}
        self.plain: set[int] = set()  # leaves with a product that can be replaced, chosen or not
        self.kept: dict[int, str] = {}  # leaf: a use of it that cannot

    def constant(self, value: Any, aval: Any) -> None:
        return None

    def join(self, *values: int | None) -> int | None:
        return values[0] if len(set(values)) == 1 else None

    def scan(self, equation: Equation, turn: Any, carry: Any, rows: Any) -> Sequence[int | None]:
        return turn([None] * len(carry), rows)  # what is carried is not a leaf in the next turn

    def operation(self, equation: Equation, inputs: list[int | None]) -> Sequence[int | None]:
        name = equation.primitive.name
        if name == "optimization_barrier":
            return inputs
        if name in _VIEWS:
            return [inputs[0]] * len(equation.outvars)
        if any(leaf is not None for leaf in inputs):
            if name == "dot_general":
                self._dot(equation, inputs)
            elif name == "conv_general_dilated":
                self._keep(inputs, "a convolution")
            elif inner_programs(equation):
                self._keep(inputs, f"within {name}")
        return [None] * len(equation.outvars)

    def _dot(self, equation: Equation, leaves: list[int | None]) -> None:
        (contracted, batch), (left, right) = equation.params["dimension_numbers"], leaves
        leaf, out = (left if right is None else right), equation.outvars[0].aval
        if left is not None and right is not None:
            return self._keep(leaves, "a product of two parameters")
        if any(batch):
            return self._keep(leaves, "a product with dims of a batch")
        if not all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in equation.invars):
            return self._keep(leaves, "a product with integers")
        assert leaf is not None
        self.plain.add(leaf)

        def multiply(a: Array, b: Array) -> Array:
            if right is not None:
                y = self._product(a, b, Contraction(*contracted))
            else:
                y = self._product(b, a, Contraction(*contracted[::-1]))
                moved = b.ndim - len(contracted[1])
                y = jnp.moveaxis(y, range(moved), range(y.ndim - moved, y.ndim))
            return y.astype(out.dtype)

        if leaf in self._chosen:
            place = place_of(self.calls, equation)
            self.replacements[place] = replace_equation(equation, multiply)

    def _keep(self, leaves: list[int | None], why: str) -> None:
        self.kept |= {leaf: why for leaf in leaves if leaf is not None}


OLDEST = (8, 9)  # compute capability of Ada; Hopper has 9.0


def quantize(
    loss: LossFn | Stateful, rows_interact: RowsInteract, precision: Precision, microbatches: int
) -> tuple[LossFn | Stateful, RowsInteract]:
    """Return the loss in fp8 if the precision says so, and whether its rows interact then.

    Raises:
        ConfigError: if whole arrays are scaled and the batch is cut into microbatches.
    """
    if not isinstance(precision, FP8):
        return loss, rows_interact
    by_tensor = precision.scaling == "tensor"
    if by_tensor and microbatches > 1:
        raise ConfigError(
            f"precision.scaling=tensor scales all rows of a product by the largest number among "
            f"them, so {microbatches} microbatches would take other steps than one batch. "
            f"Set precision.scaling=rows, or microbatches=1."
        )
    product: Any = lambda x, w, dims: fp8_product(x, w, dims, precision.scaling)
    patterns = {"products": precision.products, "exclude": precision.exclude}
    loss = quantize_loss(loss, product, **patterns)
    return loss, "batch" if by_tensor and rows_interact == "never" else rows_interact


def check_hardware(precision: Precision, devices: Sequence[Device]) -> None:
    """Check that the devices multiply in the precision, where they say what they are.

    Raises:
        ConfigError: for fp8 on an NVIDIA GPU older than Ada and Hopper.
    """
    found = compute_capability(devices[0])
    if isinstance(precision, FP8) and found and found < OLDEST:
        raise ConfigError(
            f"precision.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, "
            f"Hopper, Blackwell), and the first device is {devices[0].device_kind} of "
            f"{found[0]}.{found[1]}. Set precision.kind=bf16."
        )
