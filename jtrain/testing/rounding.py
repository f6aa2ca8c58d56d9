"""How far a loss in bfloat16 is off, and how far its roundings alone may put it."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import normalize_loss
from jtrain.core.loss_checks import check_product_precision
from jtrain.core.precision.cast import compute_in
from jtrain.core.types import Key, Leaf
from jtrain.errors import CodeError, LossError
from jtrain.testing.case import LossCase
from jtrain.testing.cause import Cause
from jtrain.testing.compare import NOTHING, distance
from jtrain.testing.float64 import ReplayRules, if_seen, wide, widened
from jtrain.testing.report import Comparison
from jtrain.testing.result import Distances
from jtrain.testing.row_sums import sums_of
from jtrain.testing.splits import taken

UNIT = 2.0**-8  # bfloat16 has 8 significant bits: to the nearest number, at most this far, relative
# Half of the last of the significant bits: 8 of bfloat16, 11 of float16, 24 of float32.
UNITS = {"bfloat16": UNIT, "float16": 2.0**-11, "float32": 2.0**-24}
DRAWS = 8
ROUNDED = 1e-5  # what float32 makes of a split is less, nearly always
TIMES = 6  # a normal number is beyond so many deviations, of 8 draws, in 1 of 3,000: Student's t


class RoundingSpread(NamedTuple):
    """A loss and a gradient, and how far roundings put them, each relative."""

    loss: float
    gradient: float


def in_bfloat16(of: LossCase, left: list[str]) -> Comparison | None:
    """The loss in bfloat16 against itself without its roundings, on half of the rows, no draws.

    What is allowed is derived from the very program: it is run in float64 as it is, which is what
    the loss in float32 is to 1e-6, and 8 times with each value that it holds in bfloat16 multiplied
    by 1 + r / 256, r uniform in -1 .. 1 as a rounding is. A difference of at most 6 times the root
    of the mean square of theirs is rounding. One that is larger comes from what rounds otherwise
    than once a value: sums that stay in bfloat16, counts above 256.

    None where the loss is not to be computed in bfloat16; and, with why in `left`, where nothing of
    it is, where it takes no parameters in it, or a kernel hides it.

    Source of the model, roundings as independent random numbers of mean 0: Higham & Mary 2019,
    https://doi.org/10.1137/18M1226312.
    """
    if of.compute is None:
        return None
    loss = compute_in(of.alone(), jnp.bfloat16)
    batch = taken(of.batch, np.arange(of.rows // 2))
    ragged = not of.masks
    terms = normalize_loss(loss, ragged=ragged)
    try:
        check_product_precision(lambda p: terms(p, of.extra, batch, None), of.params, jnp.bfloat16)
    except LossError as error:
        left.append(f"bfloat16 was not compared: {error}")
        return None
    except CodeError as told:
        error = told.__context__
        if not isinstance(error, TypeError):  # of a convolution of float32 with bfloat16, say
            raise
        first = str(error).partition("\n")[0]
        left.append(f"bfloat16 was not compared: the loss does not take its parameters so: {first}")
        return None
    narrow = sums_of(loss, ragged)
    try:
        exact, spread = spread_of(narrow, of, batch)
    except NotImplementedError as error:
        left.append(f"bfloat16 was not compared: {error}.")
        return None
    got = _values(narrow, of, batch)
    off = RoundingSpread(distance(got[0], exact[0]).by, distance(got[1], exact[1]).by)
    single = Distances(off.loss, distance(got[1], exact[1]), NOTHING, NOTHING)
    allowed = RoundingSpread(*(max(TIMES * x, 1e-6) for x in spread))
    figures = (
        f"the loss is {off.loss:.1e} off and {allowed.loss:.1e} is allowed, the gradient "
        f"{off.gradient:.1e} and {allowed.gradient:.1e}: {TIMES} times what roundings of bfloat16 "
        f"do to this program"
    )
    if off.loss <= allowed.loss and off.gradient <= allowed.gradient:
        return Comparison("bfloat16", "ok", single, None, f"{figures}.")
    return Comparison(
        "bfloat16",
        "FAILS",
        single,
        None,
        f"{figures}. It rounds more often than once a value: a sum that stays in bfloat16 (a scan "
        f"that adds, cumsum), a count above 256, a difference of numbers that are nearly alike. "
        f"Keep those in float32.",
        "rounding in bfloat16",
    )


@functools.lru_cache(maxsize=4)
def roundings(of: LossCase) -> RoundingSpread | None:
    """How far roundings of its own types put a loss, while it trains; None if a kernel hides it."""
    fn = sums_of(of.alone(), not of.masks)
    return if_seen(lambda: spread_of(fn, of, of.batch, UNITS, key=of.step_key)[1])


def no_rounding(of: LossCase, off: Distances) -> Cause | None:
    """Return a cause where a difference is larger than roundings of the loss's own types explain.

    Nothing is looked into where it is small, or a kernel hides what is computed.
    """
    if max(off.loss, off.gradient.by) <= ROUNDED or (spread := roundings(of)) is None:
        return None
    loss, gradient = (max(2**0.5 * TIMES * x, 1e-6) for x in spread)
    if off.loss <= loss and off.gradient.by <= gradient:
        return None
    return Cause(
        "rounding",
        f"in float64 it is right, and in its own types the loss is {off.loss:.1e} off and the "
        f"gradient {off.gradient.by:.1e}, where roundings of the values in the loss explain "
        f"{loss:.1e} and {gradient:.1e}. Something rounds that need not: a sum over microbatches "
        f"or devices in 16 bits, a sum by turns of a loop, a difference of large sums. Sum in "
        f"float32, and centre first.",
    )


def spread_of(
    fn: Callable[..., Any],
    of: LossCase,
    batch: Mapping[str, Any],
    units: Mapping[str, float] = MappingProxyType({"bfloat16": UNIT}),
    key: Key | None = None,
) -> tuple[tuple[Any, Any], RoundingSpread]:
    """Loss and gradient without a rounding, and how far random ones put them: mean square's root.

    Args:
        units: how far a rounding puts a value, relative, by the type that it is held in.
        key: of the step; None as it is evaluated.

    Raises:
        NotImplementedError: if a kernel hides what it computes.
    """
    rng = () if key is None else (key,)

    def rounded(seed: Any, times: Any, *given: Any) -> Any:
        def after(equation: Any, inputs: Any, outputs: Any) -> list[Any]:
            types = [str(variable.aval.dtype) for variable in equation.outvars]
            return [
                _rounded(x, seed, times * units[dtype]) if dtype in units else x
                for dtype, x in zip(types, outputs, strict=True)
            ]

        return widened(fn, ReplayRules(after=after))(*given)

    with jax.enable_x64(True):
        given = (*wide(_arguments(of, batch)), *rng)
        compiled = jax.jit(rounded)
        run = lambda seed, times: _of(compiled(jnp.uint64(seed), jnp.float64(times), *given))
        exact = run(0, 0.0)
        drawn = [run(seed, 1.0) for seed in range(1, DRAWS + 1)]
    square = lambda which: np.mean([distance(one[which], exact[which]).by ** 2 for one in drawn])
    return exact, RoundingSpread(float(square(0) ** 0.5), float(square(1) ** 0.5))


def _values(fn: Callable[..., Any], of: LossCase, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    return _of(jax.jit(fn)(*_arguments(of, batch)))


def _arguments(of: LossCase, batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of `sums_of`: the weights are those of float32, for a count is none of its roundings."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    with jax.enable_x64(False):
        terms = normalize_loss(of.alone(), ragged=not of.masks)
        weigh = jax.jit(lambda params, extra, batch: terms(params, extra, batch, None).terms.means)
        means = weigh(of.params, of.extra, arrays)
    return [mean.weight for mean in means], of.params, of.extra, arrays


def _of(found: Any) -> tuple[Any, Any]:
    """The loss and the gradient."""
    returned, gradient = jax.device_get(found)
    return np.float64(returned.terms.value()), gradient


def _rounded(x: Leaf, seed: Leaf, unit: Leaf) -> Leaf:
    """`x` off by up to a `unit`, relative."""
    # Drawn from the number itself, so that each turn of a loop rounds by itself: SplitMix64,
    # Steele, Lea & Flood 2014, https://doi.org/10.1145/2714064.2660195.
    z = jax.lax.bitcast_convert_type(x, jnp.uint64) + seed * jnp.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> jnp.uint64(30))) * jnp.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> jnp.uint64(27))) * jnp.uint64(0x94D049BB133111EB)
    z = z ^ (z >> jnp.uint64(31))
    uniform = (z >> jnp.uint64(11)).astype(jnp.float64) * 2.0**-52 - 1
    return x * (1 + unit * uniform)
