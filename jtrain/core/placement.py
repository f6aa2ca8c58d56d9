"""Placement: how a model says what its arrays are, without knowing where they go."""

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
    """How a model says what its arrays are, without knowing where they go."""

    @property
    def rows(self) -> int:
        """How many parts the rows of a batch are in."""
        ...

    @property
    def times(self) -> int:
        """How many parts each sequence is in."""
        ...

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x`, laid out by the names of its dims."""
        ...

    def attend(
        self,
        attention: Any,
        q: Array,
        k: Array,
        v: Array,
        segments: Array | None = None,
    ) -> Array:
        """`attention(q, k, v, segments)`, b t h k, wherever the parts of t and h are.

        For `Parts` the positions, those of segments too, are in the order of `order`.
        """
        ...

    def order(self, time: int) -> np.ndarray | None:
        """The order of positions, int32 t, in which each device has the same work in attention.

        A decoder takes its tokens in it, and `put_back` undoes it. None: as they are.
        """
        ...

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """`x`, whose positions are in the order of `order`, in their own."""
        ...

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """The policy of `jax.checkpoint` that saves what has these names (`checkpoint_name`)."""
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
        """`mix(x, chosen, weights, *kernels)`, wherever the rows and the experts are.

        `kernels` begin with the dim of the experts, and `dims` are the names of theirs. Of choices
        that are no index into the kernels that it gets, `mix` makes zeros.
        """
        ...

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """`x` after every layer of `stack`, whose leaves are l ..., and what each gave: l b ....

        `rows` are arrays b ... that belong to the rows of `x`: a layer gets those of its rows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """The placement that places nothing."""

    @property
    def rows(self) -> int:
        """One."""
        return 1

    @property
    def times(self) -> int:
        """One."""
        return 1

    def constrain(self, x: Shaped[Array, "..."], *dims: str | None) -> Shaped[Array, "..."]:
        """`x` itself."""
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
        """`attention(q, k, v, segments)` itself."""
        return attention(q, k, v, segments)

    def order(self, time: int) -> np.ndarray | None:
        """None: one device has all the work."""
        del time
        return None

    def put_back(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """`x` itself."""
        return x

    def saved(self, names: Sequence[str]) -> Callable[..., Any]:
        """Where it was computed."""
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
        """`mix` of them all itself."""
        del dims
        return mix(x, chosen, weights, *kernels)

    def layers(
        self, layer: Layer, stack: Params, x: Float[Array, "b t d"], rows: Any
    ) -> tuple[Float[Array, "b t d"], Any]:
        """One after the other, in a loop."""
        return jax.lax.scan(lambda x, one: layer(one, x, rows), x, stack)
