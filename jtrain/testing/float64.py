"""Replay of traced programs in float64, with random draws still made in float32."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jtrain.core.jaxpr import (
    called_jaxpr,
    equations_in,
    inner_jaxprs,
    is_opaque,
    open_jaxpr,
    scan_sizes,
)

T = TypeVar("T")
Equation: TypeAlias = Any  # of a jaxpr
After: TypeAlias = Callable[[Equation, Sequence[Any], Sequence[Any]], Sequence[Any]]

# Equations with code in another language, or with a layout of their own.
CLOSED = {"pure_callback", "io_callback", "custom_partitioning", "shard_map"}
# Types of integers that count; uint32 and uint64 hold random bits, which must wrap around.
COUNTING = {jnp.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16")}


class ReplayRules(NamedTuple):
    """Changes to a program when it is replayed.

    `after(equation, inputs, outputs)` returns replacements for the outputs of each equation
    without an inner program.
    """

    floats: bool = True
    """Compute floats in float64."""
    integers: bool = False
    """Compute integers that count in int64, so that none overflows."""
    frozen: float | None = None
    """The uniform number, 0 <= frozen < 1, that replaces each random draw; None draws."""
    after: After = lambda equation, inputs, outputs: outputs


def widen(fn: Callable, rules: ReplayRules = ReplayRules()) -> Callable:
    """Return `fn` computed in float64, for arguments and results in float64.

    `fn` is traced in float32, so its draws are the same bits; the traced program is then replayed
    in float64, where casts to float32 have no effect. Trace and call the returned function under
    `jax.enable_x64(True)`, unless `rules` widen nothing.

    Raises:
        NotImplementedError: when called, for an opaque kernel or callback; with frozen draws also
            for a loop that draws until a condition holds.
    """

    def call(*args: Any) -> Any:
        with jax.enable_x64(False):
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(
                *jax.tree.map(_float32_shape, args)
            )
        outputs = _Replay(rules).run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return call


def replay_equation(equation: Equation, inputs: Sequence[Any], rules: ReplayRules) -> Sequence[Any]:
    """Replay one equation without an inner program by these rules; return its outputs."""
    replay = _Replay(rules)
    return replay.evaluate(equation, [replay.cast(x) for x in inputs])


def unless_opaque(measure: Callable[[], T]) -> T | None:
    """Return the result of `measure`; None if a kernel or a callback is opaque."""
    try:
        return measure()
    except NotImplementedError:
        return None


def to_float64(tree: Any) -> Any:
    """Cast the floats of a tree to float64, under `jax.enable_x64(True)`."""
    return jax.tree.map(lambda x: _in_float64(jnp.asarray(x)), tree)


def _float32_shape(x: Any) -> jax.ShapeDtypeStruct:
    narrow = {jnp.dtype("float64"): jnp.float32, jnp.dtype("complex128"): jnp.complex64}
    return jax.ShapeDtypeStruct(x.shape, narrow.get(x.dtype, x.dtype))


def _double(dtype: Any) -> Any:
    """Return float64, or for a complex type the one of two float64."""
    return jnp.dtype("complex128" if jnp.issubdtype(dtype, jnp.complexfloating) else "float64")


def _in_float64(x: Any) -> Any:
    return x.astype(_double(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


class _Replay:
    """Replay of a traced program by other rules."""

    def __init__(self, rules: ReplayRules):
        self._rules = rules

    def run(self, program: Any, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a traced program."""
        jaxpr, constants = open_jaxpr(program)
        values = dict(zip(jaxpr.constvars, [self.cast(x) for x in constants], strict=True))
        values |= zip(jaxpr.invars, [self.cast(x) for x in inputs], strict=True)

        def read(atom: Any) -> Any:
            if hasattr(atom, "val"):
                return self.cast(jnp.asarray(atom.val, atom.aval.dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            values |= zip(equation.outvars, outputs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _wide(self, dtype: Any) -> Any:
        """Return the type that values of a type are computed in."""
        if self._rules.floats and jnp.issubdtype(dtype, jnp.inexact):
            return _double(dtype)
        if self._rules.integers and dtype in COUNTING:
            return jnp.dtype("int64")
        return dtype

    def cast(self, x: Any) -> Any:
        """Cast a value to the type that it is computed in."""
        x = jnp.asarray(x)
        dtype = self._wide(x.dtype)
        return x if dtype == x.dtype else x.astype(dtype)

    def _equation(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if (called := called_jaxpr(equation)) is not None:
            return self.run(called, inputs)
        if name in _INNER:
            return _INNER[name](self, equation, inputs)
        if (
            name in CLOSED
            or is_opaque(name)
            or (inner_jaxprs(equation) and not name.startswith("scatter"))
        ):
            raise NotImplementedError(f"{name} is opaque")
        outputs = [self.cast(x) for x in self.evaluate(equation, inputs)]
        return self._rules.after(equation, inputs, outputs)

    def evaluate(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """Return the outputs of an equation without an inner program."""
        primitive, params = equation.primitive, dict(equation.params)
        name = primitive.name
        if self._rules.frozen is not None and name in {"random_bits", "random_gamma"}:
            return [_fixed_draw(equation, inputs, self._rules.frozen)]
        if name == "convert_element_type":
            wide = self._wide(params["new_dtype"])
            if wide != params["new_dtype"]:
                return [inputs[0].astype(wide)]
        if name == "reduce_precision" and self._rules.floats:
            return inputs
        if name.startswith("scatter") and params.get("update_jaxpr") is not None:
            return [_scatter(name, params, inputs)]
        if name == "bitcast_convert_type":  # needs the bits of float32
            inputs = [x.astype(a.aval.dtype) for x, a in zip(inputs, equation.invars, strict=True)]
        else:
            for key in {"preferred_element_type", "dtype"} & params.keys():
                if params[key] is not None and not _is_key(params[key]):
                    params[key] = self._wide(jnp.dtype(params[key]))
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
        return outputs if primitive.multiple_results else [outputs]

    def _scan(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        params = equation.params
        body = params["jaxpr"]
        fixed, carried = scan_sizes(equation, open_jaxpr(body)[0])
        constants = inputs[:fixed]

        def step(carry: Any, xs: Any) -> Any:
            outputs = self.run(body, [*constants, *carry, *xs])
            return outputs[:carried], outputs[carried:]

        carry, rows = jax.lax.scan(
            step,
            inputs[fixed : fixed + carried],
            inputs[fixed + carried :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *rows]

    def _while(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        params = equation.params
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        if self._rules.frozen is not None and any(map(_draws, (condition, body))):
            raise NotImplementedError("a loop that draws until a condition holds may not end")
        first, second = params["cond_nconsts"], params["body_nconsts"]
        condition_constants, body_constants = inputs[:first], inputs[first : first + second]
        return jax.lax.while_loop(
            lambda carry: self.run(condition, [*condition_constants, *carry])[0],
            lambda carry: self.run(body, [*body_constants, *carry]),
            inputs[first + second :],
        )

    def _cond(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        index, *rest = inputs
        branches = [
            lambda *args, branch=branch: self.run(branch, args)
            for branch in equation.params["branches"]
        ]
        return jax.lax.switch(index, branches, *rest)


_INNER = {"scan": _Replay._scan, "while": _Replay._while, "cond": _Replay._cond}


def _fixed_draw(equation: Equation, inputs: list[Any], number: float) -> Any:
    """Return the fixed draw of a primitive for every element; a gamma draw is its mean."""
    aval = equation.outvars[0].aval
    if equation.primitive.name == "random_gamma":
        return jnp.broadcast_to(inputs[1], aval.shape)
    size = jnp.iinfo(aval.dtype).bits
    return jnp.full(aval.shape, int(number * 2**size), aval.dtype)


def _draws(program: Any) -> bool:
    return any(
        equation.primitive.name.startswith("random_")
        for equation in equations_in(open_jaxpr(program)[0])
    )


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _scatter(name: str, params: Any, inputs: list[Any]) -> Any:
    """Scatter by the public function, because the equation has an inner program in float32."""
    scatter = {
        "scatter": jax.lax.scatter,
        "scatter-add": jax.lax.scatter_add,
        "scatter-sub": jax.lax.scatter_sub,
        "scatter-mul": jax.lax.scatter_mul,
        "scatter-min": jax.lax.scatter_min,
        "scatter-max": jax.lax.scatter_max,
    }[name.replace("_", "-")]
    keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return scatter(*inputs, **{key: params[key] for key in keys})
