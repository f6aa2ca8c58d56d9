"""Aliases for what flows through a run, each with its shape."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from jtrain.core.mean import Mean, Terms

Leaf: TypeAlias = Any  # an array, or what stands for one: its shape, its sharding
Tree = TypeVar("Tree")  # any pytree, given back with the same structure
Params: TypeAlias = Any  # a pytree of leaves that are differentiated
Extra: TypeAlias = Any  # a pytree of leaves that are not: running statistics, a teacher
Key: TypeAlias = PRNGKeyArray
Keys: TypeAlias = Shaped[Array, "*b"]  # a key, or one for each row (`jtrain.row_keys`)
Batch: TypeAlias = Mapping[str, Any]  # arrays, b ...; always `row` (int32, b) and `mask` (bool, b)
Dims: TypeAlias = tuple[str | None, ...]  # the names of an array's dims; None where one has none
RowsInteract: TypeAlias = Literal["never", "batch", "slice"]

Metrics: TypeAlias = Mapping[str, Mean]
# A plain scalar means "the mean over the rows of this batch", and is refused where rows are masked.
LossValue: TypeAlias = Mean | Terms | Float[Array, ""]
# `(params, batch, rng)`; rng is the step's key, or None where nothing may be drawn: evaluation.
# Any, so that a user may write `batch: dict[str, jax.Array]` and `rng: jax.Array`.
LossFn: TypeAlias = Callable[[Params, Any, Any], LossValue | tuple[LossValue, Metrics]]
