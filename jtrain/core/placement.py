"""Placement: a model names the dims of its arrays, and the placement shards them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jtrain.core.types import Dims, Params

# (one of a stack, x, what belongs to its rows) -> x, and what it gives beside: arrays b ...
Layer: TypeAlias = Callable[[Any, Array, Any], tuple[Array, Any]]


@runtime_checkable
class Placement(Protocol):
    """Protocol by which a model names the dims of its arrays, without knowing any device."""

    @property
    def rows(self) -> int:
        """Number of shards of the rows of a batch."""
        ...

    @property
    def times(self) -> int:
        """Number of shards of each sequence."""
        ...

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """Return `x`, sharded by the names of its dims."""
        ...

    def attend(
        self,
        attention: Any,
        q: Array,
        k: Array,
        v: Array,
        segments: Array | None = None,
    ) -> Array:
        """Return `attention(q, k, v, segments)`, b t h k, however t and h are sharded.

        For `Parts` the positions, those of segments too, are in the order of `order`.
        """
        ...

    def order(self, time: int) -> np.ndarray | None:
        """Return the order of positions, int32 t, that balances attention over devices, or None.

        A decoder takes its tokens in this order, and `put_back` undoes it. None: no reordering.
        """
        ...

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return `x` with its positions back from the order of `order` in their own."""
        ...

    def sums(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """Return `fn(*arrays)`, sums over rows and time, however the arrays are sharded."""
        ...

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """Return the `jax.checkpoint` policy that saves these names (`checkpoint_name`)."""
        ...

    def experts(
        self,
        mix: Callable[..., Array],
        x: Float[Array, "b t d"],
        chosen: Int[Array, "b t n"],
        weights: Float[Array, "b t n"],
        kernels: Sequence[Array],
        dims: Sequence[Dims],
    ) -> Float[Array, "b t d"]:
        """Return `mix(x, chosen, weights, *kernels)`, however rows and experts are sharded.

        `kernels` begin with the dim of the experts, and `dims` are the names of theirs. Of choices
        that are not an index into the kernels that it gets, `mix` makes zeros.
        """
        ...

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Return `x` after every layer of `stack` (leaves l ...), and their outputs, l b ....

        `rows` are arrays b ... that belong to the rows of `x`: a layer gets those of its rows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """Placement of a single device: it moves nothing."""

    @property
    def rows(self) -> int:
        """Number of shards: one."""
        return 1

    @property
    def times(self) -> int:
        """Number of shards: one."""
        return 1

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """Return `x`."""
        del dims
        return x

    def attend(
        self,
        attention: Any,
        q: Array,
        k: Array,
        v: Array,
        segments: Array | None = None,
    ) -> Array:
        """Return `attention(q, k, v, segments)`."""
        return attention(q, k, v, segments)

    def order(self, time: int) -> np.ndarray | None:
        """Return None: one device has all the work."""
        del time
        return None

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return `x`."""
        return x

    def sums(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """Return `fn(*arrays)`."""
        return fn(*arrays)

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """Return the policy that saves these names on the device that computed them."""
        return jax.checkpoint_policies.save_only_these_names(*names)

    def experts(
        self,
        mix: Callable[..., Array],
        x: Float[Array, "b t d"],
        chosen: Int[Array, "b t n"],
        weights: Float[Array, "b t n"],
        kernels: Sequence[Array],
        dims: Sequence[Dims],
    ) -> Float[Array, "b t d"]:
        """Return `mix` of all experts."""
        del dims
        return mix(x, chosen, weights, *kernels)

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Apply the layers one after the other, in a scan."""
        return jax.lax.scan(lambda x, one: layer(one, x, rows), x, stack)
