"""A function computed in float64, its random draws still made in float32."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jtrain.jaxprs import inner

T = TypeVar("T")
Equation: TypeAlias = Any  # of a jaxpr
After: TypeAlias = Callable[[Any, Any], Any]  # (a variable, its value) -> what goes on

# What holds a program and only calls it: its equations stand in its place.
CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
# What holds another language, or a layout of its own.
OPAQUE = {
    *("pallas_call", "pure_callback", "io_callback", "ffi_call", "custom_partitioning"),
    "shard_map",
}


def widened(fn: Callable, *, after: After = lambda variable, x: x) -> Callable:
    """`fn` with each float held in float64, for arguments and results in float64.

    It is traced as it is, in float32, so that what it draws are the same bits and what it casts to
    float32 stays as wide as it came; the traced program is then done again in float64. The function
    that comes back is to be traced and called under `jax.enable_x64(True)`.

    Args:
        after: what goes on in the place of each value that an equation gave.

    Raises:
        NotImplementedError: when called, for a kernel or a callback, which no tracing sees into.
    """

    def call(*args: Any) -> Any:
        with jax.enable_x64(False):
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_narrow, args))
        outputs = _run(closed, jax.tree.leaves(args), after)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return call


def if_seen(measure: Callable[[], T]) -> T | None:
    """What it gives; None where a kernel or a callback hides what is computed."""
    try:
        return measure()
    except NotImplementedError:
        return None


def wide(tree: Any) -> Any:
    """The same with each float in float64; under `jax.enable_x64(True)`."""
    return jax.tree.map(lambda x: _held(jnp.asarray(x)), tree)


def _narrow(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if x.dtype == jnp.float64 else x.dtype)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _held(x: Any) -> Any:
    return x.astype(jnp.float64) if _is_float(x.dtype) else x


def _run(program: Any, inputs: Sequence[Any], after: After) -> list[Any]:
    """The outputs of a traced program, all floats of which are held in float64."""
    jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    known = dict(zip(jaxpr.constvars, [_held(jnp.asarray(c)) for c in constants], strict=True))
    known |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> Any:
        return (
            _held(jnp.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else known[atom]
        )

    for equation in jaxpr.eqns:
        outputs = _equation(equation, [read(atom) for atom in equation.invars], after)
        known |= zip(equation.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _equation(equation: Equation, inputs: list[Any], after: After) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    called = params.get("jaxpr", params.get("call_jaxpr"))
    if name in CALLS and called is not None:
        return _run(called, inputs, after)
    if name in INNER:
        return INNER[name](equation, inputs, after)
    if name in OPAQUE or (inner(equation) and not name.startswith("scatter")):
        raise NotImplementedError(f"{name} cannot be looked into")
    pairs = zip(equation.outvars, _bound(equation, inputs), strict=True)
    return [after(variable, _held(x)) for variable, x in pairs]


def _bound(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
    """What an equation that holds no program gives, in float64 where it gave floats."""
    primitive, params = equation.primitive, dict(equation.params)
    if primitive.name == "convert_element_type" and _is_float(params["new_dtype"]):
        return [inputs[0].astype(jnp.float64)]
    if primitive.name == "reduce_precision":
        return inputs
    if primitive.name.startswith("scatter") and params.get("update_jaxpr") is not None:
        return [_scattered(primitive.name, params, inputs)]
    if primitive.name == "bitcast_convert_type":  # of the bits that float32 has
        inputs = [x.astype(a.aval.dtype) for x, a in zip(inputs, equation.invars, strict=True)]
    else:
        for key in {"preferred_element_type", "dtype"} & params.keys():
            params[key] = jnp.float64 if _is_float(params[key] or jnp.int32) else params[key]
    found = primitive.bind(*inputs, **params)
    return found if primitive.multiple_results else [found]


def _scattered(name: str, params: Any, inputs: list[Any]) -> Any:
    """By the public function, for the equation holds a program in float32 that adds."""
    how = {
        "scatter": jax.lax.scatter,
        "scatter-add": jax.lax.scatter_add,
        "scatter-sub": jax.lax.scatter_sub,
        "scatter-mul": jax.lax.scatter_mul,
        "scatter-min": jax.lax.scatter_min,
        "scatter-max": jax.lax.scatter_max,
    }[name.replace("_", "-")]
    keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return how(*inputs, **{key: params[key] for key in keys})


def _scan(equation: Equation, inputs: list[Any], after: After) -> Sequence[Any]:
    params = equation.params
    body = params["jaxpr"]
    jaxpr = getattr(body, "jaxpr", body)
    # By shapes, as parameters have other names in jax 0.12: what is scanned has a dim more outside.
    carried = _of_same_rank(equation.outvars, jaxpr.outvars)
    before = _of_same_rank(equation.invars, jaxpr.invars)
    bound = inputs[: before - carried]

    def step(carry: Any, xs: Any) -> Any:
        outputs = _run(body, [*bound, *carry, *xs], after)
        return outputs[:carried], outputs[carried:]

    carry, rows = jax.lax.scan(
        step,
        inputs[before - carried : before],
        inputs[before:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *rows]


def _of_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)


def _while(equation: Equation, inputs: list[Any], after: After) -> Sequence[Any]:
    params = equation.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    asked, bound = inputs[:first], inputs[first : first + second]
    return jax.lax.while_loop(
        lambda carry: _run(params["cond_jaxpr"], [*asked, *carry], after)[0],
        lambda carry: _run(params["body_jaxpr"], [*bound, *carry], after),
        inputs[first + second :],
    )


def _cond(equation: Equation, inputs: list[Any], after: After) -> Sequence[Any]:
    which, *rest = inputs
    branches = [
        lambda *given, branch=branch: _run(branch, given, after)
        for branch in equation.params["branches"]
    ]
    return jax.lax.switch(which, branches, *rest)


INNER = {"scan": _scan, "while": _while, "cond": _cond}
