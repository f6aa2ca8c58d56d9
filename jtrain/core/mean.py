"""Sums over rows: `Mean`; `Statistic` and `Update`, functions of sums; `Terms`, a sum of means."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from jtrain.errors import LossError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A sum over rows and its weight, divided only when read: exact under any split of the batch.

    The weight depends on the batch alone, never on the parameters.
    """

    total: Any  # f32 (f64 of f64 values), any shape; a scalar where it is a loss
    weight: Any  # of the same dtype, the shape of `total` or a scalar

    @classmethod
    def of(
        cls,
        values: Shaped[Array, "*s"],
        mask: Bool[Array, "*s"],
        weights: Shaped[Array, "*s"] | None = None,
    ) -> "Mean":
        """Return the mean of `values` where `mask` holds, each counted `weights` times (default 1).

        Weights may be of either sign: advantages, importance weights. What the mask hides may be
        NaN or infinite.

        Raises:
            LossError: if `mask` or `weights` have another shape than `values`, or they are complex.
        """
        _check_belongs(values, mask, "a mask")
        _check_belongs(values, mask if weights is None else weights, "weights")
        if jnp.iscomplexobj(values):  # a cast would drop the imaginary part
            raise LossError("jt.Mean.of got complex values. Give real ones: jnp.abs(values) ** 2.")
        dtype = sum_dtype(values) if weights is None else sum_dtype(values, weights)
        weight = (mask if weights is None else jnp.where(mask, weights, 0)).astype(dtype)
        unmasked = jnp.where(mask, values, 0).astype(dtype)
        return cls(_sum(unmasked * weight), _sum(weight))

    def value(self) -> Any:
        """Return the mean on the host, float64; NaN where the weight is 0. Waits for the device."""
        if np.ndim(self.total) == 0 and (weight := float(self.weight)):
            return float(self.total) / weight  # the same numbers, by numpy in ten times the time
        total, weight = (np.asarray(x, np.float64) for x in (self.total, self.weight))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / weight
        return float(mean) if mean.ndim == 0 else mean

    def __rmul__(self, coefficient: Any) -> "Terms":
        return Terms((self,), (coefficient,))

    def __add__(self, other: "Mean | Terms") -> "Terms":
        return 1.0 * self + other


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=["finish"]
)
@dataclasses.dataclass(frozen=True)
class Statistic(Mean):
    """A metric that is a function of sums over rows and no mean: an F1 score, a perplexity.

    The sums are added up like those of a Mean; `finish` takes the sums of all rows.
    """

    finish: Callable[[np.ndarray, np.ndarray], Any]
    """`(total, weight) -> number or array`, on the host in float64; a function of a module, since
    two functions that are made alike differ for JAX."""

    def value(self) -> Any:
        """Return `finish(total, weight)`. Waits for the device."""
        return self.finish(np.asarray(self.total, np.float64), np.asarray(self.weight, np.float64))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=["apply"]
)
@dataclasses.dataclass(frozen=True)
class Update(Mean):
    """A change of a leaf of `extra` that is no mean: a step by the sign of a sum over rows, say.

    The sums are added up like those of a Mean; `apply` is called once a step, with those of all
    rows.
    """

    apply: Callable[[Any, Any, Any], Any]
    """`(leaf, total, weight) -> leaf`; microbatches return functions that are equal (`==`)."""


def sum_dtype(*arrays: Any) -> Any:
    """Return the type that arrays are summed in: float32, or float64 if one of them is float64."""
    wide = any(jnp.result_type(array) == np.float64 for array in arrays)
    return jnp.float64 if wide else jnp.float32


def _check_belongs(values: Any, other: Any, called: str) -> None:
    """Check that another array has the shape of `values`: the weight counts each value once."""
    shape, found = jnp.shape(values), jnp.shape(other)
    if found != shape:
        raise LossError(
            f"jt.Mean.of got values of shape {shape} and {called} of shape {found}. Give both one "
            f"shape: a value a row is `values[:, 0]` or `values.sum(-1)`, not their mean; to count "
            f"each value of a row, `jnp.broadcast_to(mask[:, None], values.shape)`."
        )


def _sum(x: Float[Array, "*s"]) -> Float[Array, ""]:
    """Sum within rows, then over rows.

    XLA:CPU sums 32 x 32 numbers one after the other, which is off by up to 3e-6; as two separate
    stages the sum is off by 4e-7 (weighted rows, the worst of 30 draws).
    """
    if x.ndim < 2:
        return x.sum()
    by_row = x.sum(tuple(range(1, x.ndim)))
    return jax.lax.optimization_barrier(by_row).sum()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """A loss to minimise: the sum of coefficient x mean, each mean with a weight of its own.

    `cross_entropy + 1e-2 * balance` makes one. A coefficient may be an array, a schedule of the
    step say, and depends on no row.
    """

    means: tuple[Mean, ...]
    coefficients: tuple[Any, ...]

    @classmethod
    def of(cls, value: "Mean | Terms") -> "Terms":
        """Return a Mean as one term of coefficient 1, and Terms as they are."""
        return value if isinstance(value, Terms) else cls((value,), (1.0,))

    def __rmul__(self, coefficient: Any) -> "Terms":
        return Terms(self.means, tuple(coefficient * c for c in self.coefficients))

    def __add__(self, other: "Mean | Terms") -> "Terms":
        other = Terms.of(other)
        return Terms(self.means + other.means, self.coefficients + other.coefficients)

    def value(self) -> float:
        """Return the sum on the host, float64: a mean of weight 0 adds 0, NaN if all do."""
        means = zip(self.coefficients, self.means, strict=True)
        found = [float(c) * mean.value() for c, mean in means if mean.weight != 0]
        return float(sum(found)) if found else float("nan")
