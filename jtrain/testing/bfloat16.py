"""The loss in bfloat16 beside the same program in float64, by a model of its roundings."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import normalize_loss
from jtrain.core.loss_checks import check_product_precision
from jtrain.core.precision.cast import compute_in
from jtrain.core.types import Leaf
from jtrain.errors import CodeError, LossError
from jtrain.testing.case import LossCase
from jtrain.testing.causes import cause
from jtrain.testing.compare import Distance, Distances, distance
from jtrain.testing.float64 import to_float64, widen
from jtrain.testing.report import Comparison
from jtrain.testing.sums import make_sums

UNIT = 2.0**-8  # bfloat16 has 8 significant bits: the largest relative rounding error
DRAWS = 8
TIMES = 6  # deviations, estimated from 8 draws, that 1 in 3,000 normal numbers exceeds: Student's t


class RoundingSpread(NamedTuple):
    """Relative rounding errors of a loss and its gradient."""

    loss: float
    gradient: float


def compare_in_bfloat16(case: LossCase, not_compared: list[str]) -> Comparison | None:
    """Compare the loss in bfloat16 with the same program in float64, without random draws.

    Both use half of the rows. The tolerance comes from the program itself: it runs in float64 once
    as it is, and 8 times with each bfloat16 value multiplied by 1 + r / 256, r uniform in -1 .. 1
    like a rounding error. A difference of at most 6 times the root mean square of these 8 is
    rounding. A larger difference comes from operations that round more than once per value.

    The result is None if the case does not ask for bfloat16. It is None with the reason in
    `not_compared` if no operation runs in bfloat16, if the loss rejects bfloat16 parameters, or if
    a kernel is opaque.

    Source of the model, rounding errors as independent random numbers of mean 0: Higham & Mary
    2019, https://doi.org/10.1137/18M1226312.
    """
    if case.compute is None:
        return None
    loss, batch = compute_in(case.unplaced_loss(), jnp.bfloat16), case.half_batch
    terms = normalize_loss(loss, ragged=not case.mask_error)
    try:
        output = lambda params: terms(params, case.extra, batch, None)
        check_product_precision(output, case.params, jnp.bfloat16)
        exact, spread = measure_spread(make_sums(terms), case, batch)
    except (LossError, CodeError, NotImplementedError) as error:
        reason = f"{str(error).rstrip('.')}."
        if isinstance(error, CodeError):
            if not isinstance(error.__context__, TypeError):  # a convolution of two types, say
                raise
            first = str(error.__context__).partition("\n")[0]
            reason = f"the loss does not take bfloat16 parameters: {first}"
        not_compared.append(f"bfloat16 was not compared: {reason}")
        return None
    rounded = _loss_and_gradient(jax.jit(make_sums(terms))(*_arguments(case, batch)))
    loss_off, gradient_off = (distance(*pair) for pair in zip(rounded, exact, strict=True))
    allowed = [max(TIMES * x, 1e-6) for x in spread]
    off = Distances(Distance(loss_off.by, "loss"), gradient_off)
    figures = (
        f"the loss is {loss_off.by:.1e} off and {allowed[0]:.1e} is allowed, the gradient "
        f"{gradient_off.by:.1e} and {allowed[1]:.1e}: {TIMES} times the effect of bfloat16 "
        f"rounding on this program."
    )
    if loss_off.by <= allowed[0] and gradient_off.by <= allowed[1]:
        return Comparison("bfloat16", "ok", off, why=figures)
    return Comparison.explained("bfloat16", cause("rounding in bfloat16", figures=figures), off)


def measure_spread(
    fn: Callable[..., Any], case: LossCase, batch: Mapping[str, Any]
) -> tuple[tuple[Any, Any], RoundingSpread]:
    """Return loss and gradient without rounding, and the root mean square of random errors.

    Raises:
        NotImplementedError: if a kernel is opaque.
    """

    def rounded(seed: Any, unit: Any, *args: Any) -> Any:
        def after(equation: Any, outputs: Any) -> list[Any]:
            narrow = [variable.aval.dtype == jnp.bfloat16 for variable in equation.outvars]
            pairs = zip(narrow, outputs, strict=True)
            return [_add_rounding(x, seed, unit) if half else x for half, x in pairs]

        return widen(fn, after=after)(*args)

    with jax.enable_x64(True):
        args, compiled = to_float64(_arguments(case, batch)), jax.jit(rounded)
        compute = lambda seed, unit: _loss_and_gradient(
            compiled(jnp.uint64(seed), jnp.float64(unit), *args)
        )
        exact = compute(0, 0.0)
        noisy = [compute(seed, UNIT) for seed in range(1, DRAWS + 1)]
    squares = [[distance(run[i], exact[i]).by ** 2 for run in noisy] for i in (0, 1)]
    return exact, RoundingSpread(*(float(np.mean(each) ** 0.5) for each in squares))


def _arguments(case: LossCase, batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of the sums, with float32 weights: counts are not to be rounded."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    with jax.enable_x64(False):
        terms = normalize_loss(case.unplaced_loss(), ragged=not case.mask_error)
        each = lambda p, e, b: [mean.weight for mean in terms(p, e, b, None).terms.means]
        weights = jax.jit(each)(case.params, case.extra, arrays)
    return weights, case.params, case.extra, arrays


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
