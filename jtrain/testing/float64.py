"""Replay of traced programs in float64, with random draws still made in float32."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jtrain.core.interpret import (
    PROGRAMS,
    Equation,
    Interpreter,
    bind,
    equations_within,
    inner_programs,
    is_opaque,
)

T = TypeVar("T")
After: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any]]

LAYOUTS = {"custom_partitioning", "shard_map"}
# Equations with code in another language, or with a layout of their own.
CLOSED = {"pure_callback", "io_callback", *LAYOUTS}
# Types of integers that count; uint32 and uint64 hold random bits, which must wrap around.
COUNTING = {jnp.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16")}


def widen(
    fn: Callable,
    *,
    floats: bool = True,
    frozen: float | None = None,
    after: After = lambda equation, outputs: outputs,
) -> Callable:
    """Return `fn` computed in float64 for arguments in float64; integers that count never overflow.

    `fn` is traced in float32, so its draws are the same bits; the traced program is then replayed
    in float64, where casts to float32 have no effect. Trace and call the returned function under
    `jax.enable_x64(True)`, if `floats`.

    Args:
        floats: False replays in the types of `fn`.
        frozen: the uniform number, 0 <= frozen < 1, that replaces each random draw; None draws.
        after: `after(equation, outputs)` returns replacements for the outputs of each operation.

    Raises:
        NotImplementedError: when called, for an opaque kernel or callback; with frozen draws also
            for a loop that draws until a condition holds.
    """

    def call(*args: Any) -> Any:
        with jax.enable_x64(False):
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(
                *jax.tree.map(_float32_shape, args)
            )
        replay = _Replay(floats, frozen, after)
        outputs = replay.run(closed, [replay.cast(x) for x in jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return call


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
    return jnp.dtype("complex128" if jnp.issubdtype(dtype, jnp.complexfloating) else "float64")


def _in_float64(x: Any) -> Any:
    return x.astype(_double(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


class _Replay(Interpreter[Any]):
    """Replay of a traced program by other rules, its loops and branches as such."""

    enters = PROGRAMS - LAYOUTS

    def __init__(self, floats: bool, frozen: float | None, after: After):
        self._floats, self._frozen, self._after = floats, frozen, after

    def _wide(self, dtype: Any) -> Any:
        if self._floats and jnp.issubdtype(dtype, jnp.inexact):
            return _double(dtype)
        return jnp.dtype("int64") if self._floats and dtype in COUNTING else dtype

    def cast(self, x: Any) -> Any:
        x = jnp.asarray(x)
        dtype = self._wide(x.dtype)
        return x if dtype == x.dtype else x.astype(dtype)

    def constant(self, value: Any, aval: Any) -> Any:
        return self.cast(value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype))

    def operation(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        inner = inner_programs(equation) and not name.startswith("scatter")
        if name in CLOSED or is_opaque(name) or inner:
            raise NotImplementedError(f"{name} is opaque")
        return self._after(equation, [self.cast(x) for x in self._compute(equation, inputs)])

    def _compute(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        name, params, changes = equation.primitive.name, equation.params, {}
        if self._frozen is not None and name in {"random_bits", "random_gamma"}:
            return [_fixed_draw(equation, inputs, self._frozen)]
        if name == "convert_element_type":
            wide = self._wide(params["new_dtype"])
            if wide != params["new_dtype"]:
                return [inputs[0].astype(wide)]
        if name == "reduce_precision" and self._floats:
            return inputs
        if name.startswith("scatter") and params.get("update_jaxpr") is not None:
            return [_scatter(name, params, inputs)]
        if name == "select_n":  # selects by int32
            inputs = [inputs[0].astype(equation.invars[0].aval.dtype), *inputs[1:]]
        if name == "bitcast_convert_type":  # needs the bits of float32
            inputs = [inputs[0].astype(equation.invars[0].aval.dtype)]
        else:
            for key in {"preferred_element_type", "dtype"} & params.keys():
                if params[key] is not None and not _is_key(params[key]):
                    changes[key] = self._wide(jnp.dtype(params[key]))
        return bind(equation, inputs, **changes)

    def scan(self, equation: Equation, turn: Any, carry: Any, rows: Any) -> Sequence[Any]:
        def step(carry: Any, rows: Any) -> Any:
            outputs = turn(carry, rows)
            return outputs[: len(carry)], outputs[len(carry) :]

        options = {key: equation.params[key] for key in ("length", "reverse", "unroll")}
        carry, rows = jax.lax.scan(step, carry, rows, **options)
        return [*carry, *rows]

    def while_loop(
        self, equation: Equation, condition: Any, turn: Any, carry: Any
    ) -> Sequence[Any]:
        draws = any(e.primitive.name.startswith("random_") for e in equations_within(equation))
        if self._frozen is not None and draws:
            raise NotImplementedError("a loop that draws until a condition holds may not end")
        return jax.lax.while_loop(condition, turn, carry)

    def cond(self, equation: Equation, index: Any, branches: Any) -> Sequence[Any]:
        return jax.lax.switch(index, branches)


def _fixed_draw(equation: Equation, inputs: list[Any], number: float) -> Any:
    """Return the fixed draw of a primitive for every element; a gamma draw is its mean."""
    aval = equation.outvars[0].aval
    if equation.primitive.name == "random_gamma":
        return jnp.broadcast_to(inputs[1], aval.shape)
    size = jnp.iinfo(aval.dtype).bits
    return jnp.full(aval.shape, int(number * 2**size), aval.dtype)


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
