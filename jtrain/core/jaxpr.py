"""Questions about a traced function: what its outputs depend on, which operations it holds."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PRODUCTS = {"dot_general", "conv_general_dilated"}
OPAQUE = {"pallas_call", "ffi_call"}  # kernels in another language
# What holds a program and only calls it: its equations stand in its place.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}


def dependence(fn: Callable[..., Any], *args: Any) -> list[set[int]]:
    """Return for each output leaf of `fn(*args)` the input leaves that it is computed from.

    Looks through jit, remat, custom derivatives and scan; any other operation that holds a program
    (`while_loop`, `cond`) is taken to need all its inputs. Nothing is run.
    """
    return input_leaves(jax.make_jaxpr(fn)(*args))


def input_leaves(closed: Any) -> list[set[int]]:
    """Return for each output of a traced function the inputs that it is computed from."""
    bits = _reach(closed.jaxpr, [1 << i for i in range(len(closed.jaxpr.invars))])
    return [{i for i in range(mask.bit_length()) if mask >> i & 1} for mask in bits]


def operations(fn: Callable[..., Any], *args: Any) -> set[str]:
    """Return the names of all primitives in `fn(*args)`, nested ones included. Nothing is run."""
    return {eqn.primitive.name for eqn in equations(fn, *args)}


def product_types(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the dtype that each product in `fn(*args)` multiplies. Nothing is run.

    The type is that of the wider factor; a product in a loop counts once.
    """
    products = (e for e in equations(fn, *args) if e.primitive.name in PRODUCTS)
    return [jnp.result_type(*(x.aval.dtype for x in e.invars[:2])) for e in products]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the programs inside an equation of a traced program."""

    def programs(value: Any) -> Iterator[Any]:
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr
        elif isinstance(value, tuple | list):
            for item in value:
                yield from programs(item)

    return [p for value in eqn.params.values() for p in programs(value)]


def is_opaque(primitive: str) -> bool:
    """Return whether a primitive is a kernel that no jaxpr describes, such as cuDNN attention."""
    return primitive in OPAQUE or primitive.startswith("dot_product_attention")


def called_jaxpr(eqn: Any) -> Any:
    """Return the program that an equation does nothing but call; None for any other equation."""
    program = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return program if eqn.primitive.name in _CALLS else None


def open_jaxpr(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return the equations of a program, closed over its constants or not, and the constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def scan_sizes(scan: Any, body: Any) -> tuple[int, int]:
    """Return how many inputs of a scan are constants of its body, and how many are carried."""
    # By shapes, as parameters have other names in jax 0.12: what is scanned has a dim more outside.
    carry = _of_same_rank(scan.outvars, body.outvars)
    return _of_same_rank(scan.invars, body.invars) - carry, carry


def equations(fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Yield the equations of `fn(*args)`, nested ones included. Nothing is run."""
    yield from equations_in(jax.make_jaxpr(fn)(*args).jaxpr)


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """Yield the operations of a traced program, the inner ones too."""
    todo = [jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            yield eqn
            todo += inner_jaxprs(eqn)


def _reach(jaxpr: Any, inputs: Sequence[int]) -> list[int]:
    """Return the outputs' dependence as bit masks, given the inputs'."""
    masks = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return 0 if hasattr(atom, "val") else masks.get(atom, 0)  # a literal, or a constant

    for eqn in jaxpr.eqns:
        args, within = [of(x) for x in eqn.invars], inner_jaxprs(eqn)
        outs = None
        if len(within) == 1 and len(within[0].invars) == len(args):
            outs = _reach(within[0], args)
            if eqn.primitive.name == "scan":
                outs = _settled(eqn, within[0], args)
        if outs is None or len(outs) != len(eqn.outvars):
            outs = [_union(args)] * len(eqn.outvars)
        masks.update(zip(eqn.outvars, outs, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _settled(scan: Any, body: Any, args: list[int]) -> list[int]:
    """Return the dependence of a scan's outputs, at the fixed point of the carry's."""
    consts, carry = scan_sizes(scan, body)
    while True:
        outs = _reach(body, args)
        before = args[consts : consts + carry]
        after = [a | b for a, b in zip(before, outs, strict=False)]
        if after == before:
            return outs
        args = [*args[:consts], *after, *args[consts + carry :]]


def _of_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    ranks = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in ranks)


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
