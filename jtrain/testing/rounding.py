"""Rounding, overflow and nonfinite values of a loss, with the operation and its line."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import named_means, normalize_loss
from jtrain.core.loss_checks import check_product_precision
from jtrain.core.precision.cast import compute_in
from jtrain.core.types import Batch, Key, Leaf
from jtrain.errors import CodeError, LossError
from jtrain.inspect.debug.eval_jaxpr import ExecutedOp, execute
from jtrain.inspect.debug.find_nan import NonfiniteTrace
from jtrain.inspect.debug.source import find_source
from jtrain.testing.case import LossCase
from jtrain.testing.causes import Cause, cause
from jtrain.testing.compare import NOTHING, Distances, distance
from jtrain.testing.float64 import (
    COUNTING,
    ReplayRules,
    replay_equation,
    to_float64,
    unless_opaque,
    widen,
)
from jtrain.testing.flow import RowCoupling
from jtrain.testing.report import Comparison
from jtrain.testing.row_sums import CompiledRowSums, make_sums, make_sums_of_terms
from jtrain.testing.splits import SumSplit, take_rows
from jtrain.testing.trials import Trials

UNIT = 2.0**-8  # bfloat16 has 8 significant bits: the largest relative rounding error
# Half of the last significant bit: of 8 in bfloat16, 11 in float16, 24 in float32.
UNITS = {"bfloat16": UNIT, "float16": 2.0**-11, "float32": 2.0**-24}
DRAWS = 8
CANCELLED = 1e-4  # relative error of a loss in float32, a thousand times that of a plain mean
ROUNDED = 1e-5  # the effect of a split in float32 is nearly always smaller
TIMES = 6  # deviations, estimated from 8 draws, that 1 in 3,000 normal numbers exceeds: Student's t
HALF = {"float16": "65,504, to 3 digits", "bfloat16": "3e38, to 2 digits"}


class RoundingSpread(NamedTuple):
    """Relative rounding errors of a loss and its gradient."""

    loss: float
    gradient: float


def compare_in_bfloat16(case: LossCase, not_compared: list[str]) -> Comparison | None:
    """Compare the loss in bfloat16 with the same program in float64, without random draws.

    Both use half of the rows. The tolerance comes from the program itself: it runs in float64 once
    as it is, equal to the loss in float32 to 1e-6, and 8 times with each bfloat16 value multiplied
    by 1 + r / 256, r uniform in -1 .. 1 like a rounding error. A difference of at most 6 times the
    root mean square of these 8 is rounding. A larger difference comes from operations that round
    more than once per value: sums that stay in bfloat16, counts above 256.

    The result is None if the case does not ask for bfloat16. It is None with the reason in
    `not_compared` if no operation runs in bfloat16, if the loss rejects bfloat16 parameters, or if
    a kernel is opaque.

    Source of the model, rounding errors as independent random numbers of mean 0: Higham & Mary
    2019, https://doi.org/10.1137/18M1226312.
    """
    if case.compute is None:
        return None
    loss = compute_in(case.unplaced_loss(), jnp.bfloat16)
    batch = take_rows(case.batch, np.arange(case.rows // 2))
    ragged = not case.mask_error
    terms = normalize_loss(loss, ragged=ragged)
    try:
        check_product_precision(
            lambda p: terms(p, case.extra, batch, None), case.params, jnp.bfloat16
        )
    except LossError as error:
        not_compared.append(f"bfloat16 was not compared: {error}")
        return None
    except CodeError as wrapped:
        error = wrapped.__context__
        if not isinstance(error, TypeError):  # such as a convolution of float32 with bfloat16
            raise
        first = str(error).partition("\n")[0]
        not_compared.append(
            f"bfloat16 was not compared: the loss does not take bfloat16 parameters: {first}"
        )
        return None
    narrow = make_sums(loss, ragged)
    try:
        exact, spread = measure_spread(narrow, case, batch)
    except NotImplementedError as error:
        not_compared.append(f"bfloat16 was not compared: {error}.")
        return None
    rounded = _values(narrow, case, batch)
    off = RoundingSpread(distance(rounded[0], exact[0]).by, distance(rounded[1], exact[1]).by)
    single = Distances(off.loss, distance(rounded[1], exact[1]), NOTHING, NOTHING)
    allowed = RoundingSpread(*(max(TIMES * x, 1e-6) for x in spread))
    figures = (
        f"the loss is {off.loss:.1e} off and {allowed.loss:.1e} is allowed, the gradient "
        f"{off.gradient:.1e} and {allowed.gradient:.1e}: {TIMES} times the effect of bfloat16 "
        f"rounding on this program"
    )
    if off.loss <= allowed.loss and off.gradient <= allowed.gradient:
        return Comparison("bfloat16", "ok", single, None, f"{figures}.")
    return Comparison(
        "bfloat16",
        "FAILS",
        single,
        None,
        f"{figures}. The loss rounds more than once per value: a sum that stays in bfloat16 (a "
        f"scan that adds, cumsum), a count above 256, a difference of nearly equal numbers. Keep "
        f"these in float32.",
        "rounding in bfloat16",
    )


@functools.lru_cache(maxsize=4)
def measure_roundings(case: LossCase) -> RoundingSpread | None:
    """Measure the rounding errors of a loss in its own types; None if a kernel is opaque."""
    fn = make_sums(case.unplaced_loss(), not case.mask_error)
    return unless_opaque(lambda: measure_spread(fn, case, case.batch, UNITS, key=case.step_key)[1])


def explain_rounding(case: LossCase, off: Distances) -> Cause | None:
    """Return a cause if a difference exceeds what rounding in the loss's own types explains.

    The result is None for small differences and for opaque kernels.
    """
    if max(off.loss, off.gradient.by) <= ROUNDED or (spread := measure_roundings(case)) is None:
        return None
    loss, gradient = (max(2**0.5 * TIMES * x, 1e-6) for x in spread)
    if off.loss <= loss and off.gradient.by <= gradient:
        return _explain_cancellation(case, off)
    return cause(
        "rounding",
        loss=off.loss,
        gradient=off.gradient.by,
        loss_allowed=loss,
        gradient_allowed=gradient,
    )


def _explain_cancellation(case: LossCase, off: Distances) -> Cause | None:
    """Return the cause if the float32 values of a loss, and no narrower ones, lose its digits."""
    if off.loss <= CANCELLED:
        return None
    fn = make_sums(case.unplaced_loss(), not case.mask_error)
    _, spread = measure_spread(fn, case, case.batch, {"float32": UNITS["float32"]}, case.step_key)
    if TIMES * spread.loss <= CANCELLED:
        return None
    return cause("cancellation", loss=off.loss)


def measure_spread(
    fn: Callable[..., Any],
    case: LossCase,
    batch: Mapping[str, Any],
    units: Mapping[str, float] = MappingProxyType({"bfloat16": UNIT}),
    key: Key | None = None,
) -> tuple[tuple[Any, Any], RoundingSpread]:
    """Return loss and gradient without rounding, and the root mean square of random errors.

    Args:
        units: the largest relative rounding error of each type.
        key: key of the step; None as in evaluation.

    Raises:
        NotImplementedError: if a kernel is opaque.
    """
    rng = () if key is None else (key,)

    def rounded(seed: Any, times: Any, *args: Any) -> Any:
        def after(equation: Any, inputs: Any, outputs: Any) -> list[Any]:
            types = [str(variable.aval.dtype) for variable in equation.outvars]
            return [
                _add_rounding(x, seed, times * units[dtype]) if dtype in units else x
                for dtype, x in zip(types, outputs, strict=True)
            ]

        return widen(fn, ReplayRules(after=after))(*args)

    with jax.enable_x64(True):
        args = (*to_float64(_arguments(case, batch)), *rng)
        compiled = jax.jit(rounded)
        compute = lambda seed, times: _loss_and_gradient(
            compiled(jnp.uint64(seed), jnp.float64(times), *args)
        )
        exact = compute(0, 0.0)
        noisy = [compute(seed, 1.0) for seed in range(1, DRAWS + 1)]
    mean_square = lambda i: np.mean([distance(run[i], exact[i]).by ** 2 for run in noisy])
    return exact, RoundingSpread(float(mean_square(0) ** 0.5), float(mean_square(1) ** 0.5))


def _values(fn: Callable[..., Any], case: LossCase, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    return _loss_and_gradient(jax.jit(fn)(*_arguments(case, batch)))


def _arguments(case: LossCase, batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of the sums, with float32 weights: counts are not to be rounded."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    with jax.enable_x64(False):
        terms = normalize_loss(case.unplaced_loss(), ragged=not case.mask_error)
        weights_of = jax.jit(
            lambda params, extra, batch: terms(params, extra, batch, None).terms.means
        )
        means = weights_of(case.params, case.extra, arrays)
    return [mean.weight for mean in means], case.params, case.extra, arrays


def _loss_and_gradient(sums: Any) -> tuple[Any, Any]:
    """Return the loss and the gradient as numpy arrays."""
    returned, gradient = jax.device_get(sums)
    return np.float64(returned.terms.value()), gradient


def _add_rounding(x: Leaf, seed: Leaf, unit: Leaf) -> Leaf:
    """Multiply `x` by 1 + r, r uniform in -unit .. unit."""
    # r is a hash of the number itself, so that the turns of a loop round independently: SplitMix64,
    # Steele, Lea & Flood 2014, https://doi.org/10.1145/2714064.2660195.
    z = jax.lax.bitcast_convert_type(x, jnp.uint64) + seed * jnp.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> jnp.uint64(30))) * jnp.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> jnp.uint64(27))) * jnp.uint64(0x94D049BB133111EB)
    z = z ^ (z >> jnp.uint64(31))
    uniform = (z >> jnp.uint64(11)).astype(jnp.float64) * 2.0**-52 - 1
    return x * (1 + unit * uniform)


def explain_nonfinite(rows: CompiledRowSums, batch: Batch) -> Cause | None:
    """Return which operation makes an infinity or a NaN from finite inputs, in float32.

    The result is None if the loss and its gradient are finite when operations run one by one.
    """
    case, names, terms = rows.case, [], rows.case.terms()

    def numbers(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        weights = [mean.weight for mean in terms(params, extra, batch, rng).terms.means]
        returned, gradient = make_sums_of_terms(terms)(weights, params, extra, batch, rng)
        found = [(n, x) for n, m in named_means(returned).items() for x in (m.total, m.weight)]
        found += [("the gradient", x) for x in jax.tree.leaves(gradient)]
        names.extend(name for name, _ in found)
        return [x for _, x in found]

    args = jax.tree.map(jnp.asarray, (rows.params, case.extra, dict(batch)))
    program = jax.make_jaxpr(numbers)(*args, rows.key)
    trace = NonfiniteTrace(program, [*jax.tree.leaves(args), rows.key])
    for name, output in zip(names, trace.outputs, strict=True):
        if not trace.broken(output):
            continue
        origins = [origin for origin in trace.origins(output) if origin.equation is not None]
        if not origins:
            return cause("not finite (inputs)", name=name)
        origin = origins[0]
        operation = f"{origin.what}{_at(origin.equation, origin.calls)}"
        if origin.dtype in HALF:
            limit = HALF[origin.dtype]
            return cause(
                "overflow", name=name, operation=operation, dtype=origin.dtype, limit=limit
            )
        return cause("not finite", name=name, operation=operation)
    return None


def _at(equation: Any, calls: Any) -> str:
    lines = find_source(equation, calls)
    return f" at {lines[-1]}" if lines else ""


def explain_overflow(split: SumSplit, trials: Trials) -> Cause:
    """Return which integer operation overflows, once wider integers are known to add up."""
    case, rows = trials.case, trials.rows
    terms = case.terms()

    def totals(params: Any, extra: Any, batch: Any, rng: Any) -> list[Any]:
        found = named_means(terms(params, extra, batch, rng)).values()
        return [x for mean in found for x in (mean.total, mean.weight)]

    args = jax.tree.map(jnp.asarray, (rows.params, case.extra, dict(split.whole)))
    program = jax.make_jaxpr(totals)(*args, rows.key)
    where: list[str] = []

    def record(executed: ExecutedOp) -> None:
        if not where and (overflow := _describe_overflow(executed)):
            where.append(f"{overflow}{_at(executed.equation, executed.calls)}")

    execute(program, [*jax.tree.leaves(args), rows.key], record)
    return cause("overflow (integers)", where=where[0] if where else "integers overflow")


def _describe_overflow(executed: ExecutedOp) -> str:
    """Return a description of the overflow in an operation; empty if there is none."""
    output = executed.outputs[0].array
    if output.dtype not in COUNTING:
        return ""
    with jax.enable_x64(True):
        rules = ReplayRules(floats=False, integers=True)
        wide = np.asarray(
            replay_equation(executed.equation, [v.array for v in executed.inputs], rules)[0]
        )
    if np.array_equal(wide, np.asarray(output)):
        return ""
    worst = np.ravel(wide)[np.argmax(np.abs(np.ravel(wide)))]
    return (
        f"{executed.equation.primitive.name} gives {worst} in {output.dtype}, which cannot hold it"
    )


def explain_few_bits(kind: str, name: str, where: RowCoupling) -> Cause:
    """Return the cause for a sum over rows in a type that is too narrow for many rows."""
    operation = f"{where.operation}{f' at {where.line}' if where.line else ''}"
    if kind == "whole":
        return cause("overflow (whole)", name=name, dtype=where.dtype, operation=operation)
    limit = HALF.get(where.dtype, "few")
    return cause("narrow sum", name=name, dtype=where.dtype, operation=operation, limit=limit)
