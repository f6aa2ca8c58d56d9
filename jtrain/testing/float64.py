"""A function computed in float64, its random draws still made in float32."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jtrain.core.jaxpr import inner_jaxprs

T = TypeVar("T")
Equation: TypeAlias = Any  # of a jaxpr
After: TypeAlias = Callable[[Equation, Sequence[Any], Sequence[Any]], Sequence[Any]]

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
# Integers that are numbers; uint32 and uint64 hold the bits of draws, which are to wrap around.
COUNTING = {jnp.dtype(name) for name in ("int8", "int16", "int32", "uint8", "uint16")}


class ReplayRules(NamedTuple):
    """What is another where a program is done again.

    `after(equation, inputs, outputs)` gives what goes on in the place of the outputs of each
    equation that holds no program.
    """

    floats: bool = True
    """Hold each float in float64."""
    integers: bool = False
    """Hold each integer that counts in int64, so that none overflows."""
    frozen: float | None = None
    """Draw this number, uniform in 0 .. 1, in the place of every random one."""
    after: After = lambda equation, inputs, outputs: outputs
    look: Callable[[Equation, Sequence[Any]], None] = lambda equation, inputs: None
    """Is called with each equation that stands outside of loops and branches, and its inputs."""


def widened(fn: Callable, rules: ReplayRules = ReplayRules()) -> Callable:
    """`fn` with each float held in float64, for arguments and results in float64.

    It is traced as it is, in float32, so that what it draws are the same bits and what it casts to
    float32 stays as wide as it came; the traced program is then done again in float64. The function
    that comes back is to be traced and called under `jax.enable_x64(True)`; without it where
    `rules` hold nothing wider.

    Raises:
        NotImplementedError: when called, for a kernel or a callback, which no tracing sees into;
            for a loop that draws until it is content, where draws are frozen.
    """

    def call(*args: Any) -> Any:
        with jax.enable_x64(False):
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(_narrow, args))
        outputs = _Again(rules).run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return call


def frozen(fn: Callable, number: float) -> Callable:
    """Return `fn` with every random draw replaced by a fixed one, all else as it is.

    What depends on nothing but the draws then stays the same: a key, the place of a row, who else
    is there.

    Args:
        number: the uniform draw in 0 .. 1 that each is replaced by.

    Raises:
        NotImplementedError: as of `widened`.
    """
    return widened(fn, ReplayRules(floats=False, frozen=number))


def done_again(equation: Equation, inputs: Sequence[Any], rules: ReplayRules) -> Sequence[Any]:
    """Return the outputs of one equation that holds no program, by other rules."""
    again = _Again(rules)
    return again.bound(equation, [again.held(x) for x in inputs])


def if_seen(measure: Callable[[], T]) -> T | None:
    """What it gives; None where a kernel or a callback hides what is computed."""
    try:
        return measure()
    except NotImplementedError:
        return None


def wide(tree: Any) -> Any:
    """The same with each float in float64; under `jax.enable_x64(True)`."""
    return jax.tree.map(lambda x: _in_float64(jnp.asarray(x)), tree)


def _narrow(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if x.dtype == jnp.float64 else x.dtype)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _in_float64(x: Any) -> Any:
    return x.astype(jnp.float64) if _is_float(x.dtype) else x


class _Again:
    """Does a traced program again, by other rules."""

    def __init__(self, rules: ReplayRules):
        self._rules = rules
        self._inside = 0  # of how many loops and branches

    def run(self, program: Any, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a traced program."""
        jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        known = dict(zip(jaxpr.constvars, [self.held(x) for x in constants], strict=True))
        known |= zip(jaxpr.invars, [self.held(x) for x in inputs], strict=True)

        def read(atom: Any) -> Any:
            if hasattr(atom, "val"):
                return self.held(jnp.asarray(atom.val, atom.aval.dtype))
            return known[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            known |= zip(equation.outvars, outputs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _wide(self, dtype: Any) -> Any:
        """The type that a value of another is held in."""
        if self._rules.floats and _is_float(dtype):
            return jnp.dtype("float64")
        if self._rules.integers and dtype in COUNTING:
            return jnp.dtype("int64")
        return dtype

    def held(self, x: Any) -> Any:
        """A value, in the type that it is held in."""
        x = jnp.asarray(x)
        dtype = self._wide(x.dtype)
        return x if dtype == x.dtype else x.astype(dtype)

    def _equation(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        called = params.get("jaxpr", params.get("call_jaxpr"))
        if name in CALLS and called is not None:
            return self.run(called, inputs)
        if name in _INNER:
            self._inside += 1
            try:
                return _INNER[name](self, equation, inputs)
            finally:
                self._inside -= 1
        if name in OPAQUE or (inner_jaxprs(equation) and not name.startswith("scatter")):
            raise NotImplementedError(f"{name} cannot be looked into")
        if not self._inside:
            self._rules.look(equation, inputs)
        outputs = [self.held(x) for x in self.bound(equation, inputs)]
        return self._rules.after(equation, inputs, outputs)

    def bound(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """What an equation that holds no program gives, in the types that values are held in."""
        primitive, params = equation.primitive, dict(equation.params)
        name = primitive.name
        if self._rules.frozen is not None and name in {"random_bits", "random_gamma"}:
            return [_fixed(equation, inputs, self._rules.frozen)]
        if name == "convert_element_type":
            wide = self._wide(params["new_dtype"])
            if wide != params["new_dtype"]:
                return [inputs[0].astype(wide)]
        if name == "reduce_precision" and self._rules.floats:
            return inputs
        if name.startswith("scatter") and params.get("update_jaxpr") is not None:
            return [_scattered(name, params, inputs)]
        if name == "bitcast_convert_type":  # of the bits that float32 has
            inputs = [x.astype(a.aval.dtype) for x, a in zip(inputs, equation.invars, strict=True)]
        else:
            for key in {"preferred_element_type", "dtype"} & params.keys():
                if params[key] is not None and not _is_key(params[key]):
                    params[key] = self._wide(jnp.dtype(params[key]))
        found = primitive.bind(*inputs, **primitive.get_bind_params(params))
        return found if primitive.multiple_results else [found]

    def _scan(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        params = equation.params
        body = params["jaxpr"]
        jaxpr = getattr(body, "jaxpr", body)
        # By shapes, as parameters have other names in jax 0.12: what is scanned has a dim more
        # outside.
        carried = _of_same_rank(equation.outvars, jaxpr.outvars)
        before = _of_same_rank(equation.invars, jaxpr.invars)
        bound = inputs[: before - carried]

        def step(carry: Any, xs: Any) -> Any:
            outputs = self.run(body, [*bound, *carry, *xs])
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

    def _while(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        params = equation.params
        asks, does = params["cond_jaxpr"], params["body_jaxpr"]
        if self._rules.frozen is not None and any(map(_draws, (asks, does))):
            raise NotImplementedError("a loop that draws until it is content may not end")
        first, second = params["cond_nconsts"], params["body_nconsts"]
        asked, bound = inputs[:first], inputs[first : first + second]
        return jax.lax.while_loop(
            lambda carry: self.run(asks, [*asked, *carry])[0],
            lambda carry: self.run(does, [*bound, *carry]),
            inputs[first + second :],
        )

    def _cond(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        which, *rest = inputs
        branches = [
            lambda *given, branch=branch: self.run(branch, given)
            for branch in equation.params["branches"]
        ]
        return jax.lax.switch(which, branches, *rest)


_INNER = {"scan": _Again._scan, "while": _Again._while, "cond": _Again._cond}


def _fixed(equation: Equation, inputs: list[Any], number: float) -> Any:
    """What a primitive draws, the same for every element; a gamma draw is its mean."""
    aval = equation.outvars[0].aval
    if equation.primitive.name == "random_gamma":
        return jnp.broadcast_to(inputs[1], aval.shape)
    size = jnp.iinfo(aval.dtype).bits
    return jnp.full(aval.shape, int(number * 2**size), aval.dtype)


def _draws(program: Any) -> bool:
    jaxpr = getattr(program, "jaxpr", program)
    return any(
        equation.primitive.name.startswith("random_") or any(map(_draws, inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


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


def _of_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)
