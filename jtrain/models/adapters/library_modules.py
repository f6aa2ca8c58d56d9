"""Conventions of other libraries' modules: training arguments, and running statistics."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jtrain.core.mean import Mean
from jtrain.core.pytree import at_least_f32
from jtrain.core.types import Extra, Keys, Leaf
from jtrain.errors import LossError

TRAINS = ("train", "training", "is_training")
EVALUATES = ("deterministic", "inference", "use_running_average")
OF_BATCH = ("mask", "segments")  # arrays of a batch that a module may take by name


def keys_argument(call: Callable[..., Any], rng: Keys | None) -> dict[str, Keys]:
    """Return the keyword argument `keys`, where `call` takes it and `rng` is the keys of rows."""
    if rng is None or rng.ndim == 0 or "keys" not in inspect.signature(call).parameters:
        return {}
    return {"keys": rng}


def make_switch(call: Callable[..., Any], what: str) -> Callable[[bool], dict[str, Any]]:
    """Return `train -> keyword arguments` for the switches that `call` takes.

    In training `train`, `training` and `is_training` are True, and `deterministic`, `inference` and
    `use_running_average` False. A function that takes none of them gets no argument.

    Raises:
        LossError: if `call` takes `**keywords`, which hides its switches.
    """
    taken = inspect.signature(call).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        raise LossError(
            f"{what} must name its switch of training, and takes "
            f"`**{list(taken)[-1]}`. Write the switch by name: `{TRAINS[0]}` or `{EVALUATES[0]}`."
        )
    on, off = [n for n in TRAINS if n in taken], [n for n in EVALUATES if n in taken]
    return lambda train: dict.fromkeys(on, train) | dict.fromkeys(off, not train)


def mean_of_slices(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """Return `new` as a stateful loss does: a Mean where a leaf is not that of `old`.

    A batch norm of another library returns its next running statistics, and no sums over rows. With
    `couples="batch"` its rows are all rows, and `new` is returned bit for bit. With
    `couples="slice"` the state becomes the mean over the slices, each weighted by its share of real
    rows (`mask`); a slice without real rows counts for nothing. The variance between slices is in
    no slice's variance, so the result is smaller than the variance of the whole batch. Integers,
    such as counters, are not weighted.
    """
    real = jnp.mean(mask, dtype=jnp.float32)  # exactly 1 where every row is

    def leaf(before: Leaf, after: Leaf) -> Any:
        if after is before:
            return before
        inexact = jnp.issubdtype(after.dtype, jnp.inexact)
        weight = real if inexact else (real > 0).astype(jnp.float32)
        wide = at_least_f32(after) if inexact else after.astype(jnp.float32)
        return Mean(jnp.where(real > 0, wide * weight, 0), weight)

    return jax.tree.map(leaf, old, new)


def stateful_output(old: Extra, new: Extra, mask: Bool[Array, "b"]) -> Extra:
    """Return `new` as a stateful loss does, for layers of any library.

    Layers of this package return Means already; the others are handled by `mean_of_slices`.
    """
    if not jax.tree.leaves(old):
        return old
    leaf = lambda before, after: (
        after if isinstance(after, Mean) else mean_of_slices(before, after, mask)
    )
    return jax.tree.map(leaf, old, new)
