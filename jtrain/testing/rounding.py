"""How far a loss in bfloat16 is off, and how far its roundings alone may put it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.errors import LossError
from jtrain.loss_checks import refuse_wide_products
from jtrain.precision import computed_in
from jtrain.terms import in_terms
from jtrain.testing.compare import NOTHING, apart
from jtrain.testing.report import Row
from jtrain.testing.result import Distances
from jtrain.testing.splits import taken
from jtrain.testing.subject import Subject
from jtrain.testing.sums import sums_of
from jtrain.testing.widened import wide, widened
from jtrain.types import Leaf

UNIT = 2.0**-8  # bfloat16 has 8 significant bits: to the nearest number, at most this far, relative
DRAWS = 8
TIMES = 6  # a normal number is beyond so many deviations, of 8 draws, in 1 of 3,000: Student's t


class Spread(NamedTuple):
    """A loss and a gradient, and how far roundings put them, each relative."""

    loss: float
    gradient: float


def in_bfloat16(of: Subject, left: list[str]) -> Row | None:
    """The loss in bfloat16 against itself without its roundings, on half of the rows, no draws.

    What is allowed is derived from the very program: it is run in float64 as it is, which is what
    the loss in float32 is to 1e-6, and 8 times with each value that it holds in bfloat16 multiplied
    by 1 + r / 256, r uniform in -1 .. 1 as a rounding is. A difference of at most 6 times the root
    of the mean square of theirs is rounding. One that is larger comes from what rounds otherwise
    than once a value: sums that stay in bfloat16, counts above 256.

    None, with why in `left`, where nothing of it is computed in bfloat16, where it takes no
    parameters in it, or a kernel hides it.

    Source of the model, roundings as independent random numbers of mean 0: Higham & Mary 2019,
    https://doi.org/10.1137/18M1226312.
    """
    loss = computed_in(of.alone(), jnp.bfloat16)
    batch = taken(of.batch, np.arange(of.rows // 2))
    ragged = not of.masks
    terms = in_terms(loss, ragged=ragged)
    try:
        refuse_wide_products(lambda p: terms(p, of.extra, batch, None), of.params, jnp.bfloat16)
    except LossError as error:
        left.append(f"bfloat16 was not compared: {error}")
        return None
    except TypeError as error:  # a convolution of float32 with bfloat16, say; it casts nothing
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
    off = Spread(apart(got[0], exact[0]).by, apart(got[1], exact[1]).by)
    single = Distances(off.loss, apart(got[1], exact[1]), NOTHING, NOTHING)
    allowed = Spread(*(max(TIMES * x, 1e-6) for x in spread))
    figures = (
        f"the loss is {off.loss:.1e} off and {allowed.loss:.1e} is allowed, the gradient "
        f"{off.gradient:.1e} and {allowed.gradient:.1e}: {TIMES} times what roundings of bfloat16 "
        f"do to this program"
    )
    if off.loss <= allowed.loss and off.gradient <= allowed.gradient:
        return Row("bfloat16", "ok", single, None, f"{figures}.")
    return Row(
        "bfloat16",
        "FAILS",
        single,
        None,
        f"{figures}. It rounds more often than once a value: a sum that stays in bfloat16 (a scan "
        f"that adds, cumsum), a count above 256, a difference of numbers that are nearly alike. "
        f"Keep those in float32.",
        "rounding in bfloat16",
    )


def spread_of(
    fn: Callable[..., Any], of: Subject, batch: Mapping[str, Any]
) -> tuple[tuple[Any, Any], Spread]:
    """Loss and gradient without a rounding, and how far random ones put them: mean square's root.

    Raises:
        NotImplementedError: if a kernel hides what it computes.
    """

    def rounded(seed: Any, unit: Any, *given: Any) -> Any:
        return widened(fn, after=lambda variable, x: _rounded(variable, x, seed, unit))(*given)

    with jax.enable_x64(True):
        given = wide(_arguments(of, batch))
        compiled = jax.jit(rounded)
        run = lambda seed, unit: _of(compiled(jnp.uint64(seed), jnp.float64(unit), *given))
        exact = run(0, 0.0)
        drawn = [run(seed, UNIT) for seed in range(1, DRAWS + 1)]
    square = lambda which: np.mean([apart(one[which], exact[which]).by ** 2 for one in drawn])
    return exact, Spread(float(square(0) ** 0.5), float(square(1) ** 0.5))


def _values(fn: Callable[..., Any], of: Subject, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    return _of(jax.jit(fn)(*_arguments(of, batch)))


def _arguments(of: Subject, batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of `sums_of`: the weights are those of float32, for a count is none of its roundings."""
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    with jax.enable_x64(False):
        terms = in_terms(of.alone(), ragged=not of.masks)
        weigh = jax.jit(lambda params, extra, batch: terms(params, extra, batch, None).terms.means)
        means = weigh(of.params, of.extra, arrays)
    return [mean.weight for mean in means], of.params, of.extra, arrays


def _of(found: Any) -> tuple[Any, Any]:
    """The loss and the gradient."""
    returned, gradient = jax.device_get(found)
    return np.float64(returned.terms.value()), gradient


def _rounded(variable: Any, x: Leaf, seed: Leaf, unit: Leaf) -> Leaf:
    """`x` off by up to a `unit`, relative, where the program holds it in bfloat16."""
    if variable.aval.dtype != jnp.bfloat16:
        return x
    # Drawn from the number itself, so that each turn of a loop rounds by itself: SplitMix64,
    # Steele, Lea & Flood 2014, https://doi.org/10.1145/2714064.2660195.
    z = jax.lax.bitcast_convert_type(x, jnp.uint64) + seed * jnp.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> jnp.uint64(30))) * jnp.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> jnp.uint64(27))) * jnp.uint64(0x94D049BB133111EB)
    z = z ^ (z >> jnp.uint64(31))
    uniform = (z >> jnp.uint64(11)).astype(jnp.float64) * 2.0**-52 - 1
    return x * (1 + unit * uniform)
