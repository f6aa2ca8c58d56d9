"""A family of published models: how its config and its tensors become ours, and back."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jtrain.errors import CheckpointError

MOST_LAYERS = 9999
Supported: TypeAlias = Mapping[str, "tuple[Any, ...] | Supported"]
"""The values that are computed of each entry, or the table of an object."""


def check_entries(
    entries: Mapping[str, Any],
    supported: Supported,
    *,
    file: str = "config.json",
    where: str = "",
    family: str = "",
) -> None:
    """Raise CheckpointError if an entry has a value that the model does not compute.

    Args:
        entries: those of a file; one that is missing has its default.
        where: the objects around the entries, each with a dot behind it.
        family: the name of the family; empty: that in the entries.
    """
    family = family or entries.get("model_type") or entries.get("architecture", "")
    for key, values in supported.items():
        found = entries.get(key)
        if isinstance(values, Mapping):
            if isinstance(found, Mapping):
                check_entries(found, values, file=file, where=f"{where}{key}.", family=family)
        elif key in entries and found not in values:
            raise CheckpointError(
                f"{file} has {where}{key}={reprlib.repr(found)}, and for the family {family} "
                f"jtrain computes only {' or '.join(map(repr, values))}. Use a model with one of "
                f"these; weights read into another function give wrong outputs."
            )


Arrays: TypeAlias = tuple[Any, ...]  # numpy arrays, or tracers


class Transform(NamedTuple):
    """Parameters from published tensors, and back; a tuple of arrays on both sides."""

    join: Callable[[Arrays], Arrays]
    split: Callable[[Arrays], Arrays]

    def then(self, other: "Transform") -> "Transform":
        """Return this transform followed by another one."""
        return Transform(lambda x: other.join(self.join(x)), lambda x: self.split(other.split(x)))


def each(forward: Callable[[Any], Any], inverse: Callable[[Any], Any]) -> Transform:
    """Return the transform of every array alone."""
    return Transform(lambda x: tuple(map(forward, x)), lambda x: tuple(map(inverse, x)))


SAME = each(lambda x: x, lambda x: x)
TRANSPOSE = each(lambda x: x.T, lambda x: x.T)
STACK = Transform(lambda x: (_module(x).stack(x),), lambda x: tuple(x[0]))
"""Arrays to one with a leading dim."""


def reshape(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Transform:
    """Return the transform of a tensor of another shape with the same order of numbers."""

    def change(x: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
        if x.shape != before:
            raise ValueError(f"{x.shape} is not {before}")
        return x.reshape(after)

    return each(lambda x: change(x, theirs, ours), lambda x: change(x, ours, theirs))


def linear(inputs: int, outputs: int) -> Transform:
    """Return the transform of o i to a kernel of `jtrain.models.layers.linear`: wide dim last."""
    return TRANSPOSE if outputs >= inputs else SAME


def by_group(heads: int, groups: int) -> Transform:
    """Return the transform of queries, keys and values, (h k) ..., to rows group by group.

    A group has its queries, then its key and its value.
    """
    shared = heads // groups

    def join(arrays: Arrays) -> Arrays:
        rows = [x.reshape(groups, -1, *x.shape[1:]) for x in arrays]
        return (_module(arrays).concatenate(rows, 1).reshape(-1, *arrays[0].shape[1:]),)

    def split(arrays: Arrays) -> Arrays:
        (x,) = arrays
        rows = x.reshape(groups, shared + 2, -1, *x.shape[1:])
        parts = rows[:, :shared], rows[:, shared : shared + 1], rows[:, shared + 1 :]
        return tuple(part.reshape(-1, *x.shape[1:]) for part in parts)

    return Transform(join, split)


def _thirds(arrays: Arrays) -> Arrays:
    (x,) = arrays
    third = x.shape[0] // 3
    return tuple(x[i * third : (i + 1) * third] for i in range(3))


THIRDS = Transform(_thirds, lambda x: (_module(x).concatenate(x, 0),))
"""One tensor of queries, keys and values, rows first, to the three, which `by_group` joins."""


def _module(arrays: Arrays) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


Values: TypeAlias = dict[str, Any]  # fields of a model's config
HFConfig: TypeAlias = Mapping[str, Any]  # the content of a config.json


class Leaf(NamedTuple):
    """A parameter, the published tensors that it is made from, and the transform."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of published models.

    Both configs are complete: `hf(model)` then `values` gives the fields of `model` again, which
    is how the family of a model is found.
    """

    name: str
    """The `model_type` of its config.json."""
    architecture: str
    """The architecture of an exported config.json; of timm's, the config gives it."""
    kind: str
    """The `kind` of our config."""
    entries: Supported
    """Values that are computed of each entry that `transformers` reads, or timm."""
    values: Callable[[HFConfig], Values]
    """Fields of our config; raises CheckpointError for values that our model does not have."""
    defaults: HFConfig = dataclasses.field(default_factory=dict)
    """Entries that published files leave out."""
    hf: Callable[[Any], Values]
    """Entries of config.json for our config."""
    leaves: Callable[[Any], Iterator[Leaf]]
    """Table of the parameters of our config."""
    prefix: str = ""
    """Beginning of the tensors' names, which some files leave out."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that hold no weight, such as masks."""
    surplus: Callable[[Any], tuple[str, ...]] = lambda model: ()
    """Beginnings of the names of tensors for which our config has no use, such as other heads."""
    rename: Callable[[Any, str], str] = lambda model, name: name
    """The present name of a tensor, for one of another file; the first argument is our config."""
    timm: frozenset[str] = frozenset()
    """Architectures of timm; empty: a family of `transformers`."""
    mean: float | None = None
    """Mean and deviation of the pixels, where no file beside config.json says another."""

    def read(self, hf: HFConfig) -> Values:
        """Return the fields of our config; raise CheckpointError if an entry is not computed."""
        hf = {**self.defaults, **hf}
        check_entries(hf, self.entries)
        try:
            return self.values(hf)
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json of the family {self.name} is broken ({type(error).__name__}: "
                f"{error}). Download the folder again."
            ) from None


def layer_norm_leaves(ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield the scale and the bias of a LayerNorm."""
    yield Leaf(f"{ours}/scale", (f"{theirs}.weight",))
    yield Leaf(f"{ours}/bias", (f"{theirs}.bias",))


def linear_leaves(
    ours: str, theirs: str, inputs: int, outputs: int, *, bias: bool = True, columns: bool = False
) -> Iterator[Leaf]:
    """Yield the kernel of a linear map, and its bias; `columns`: it is stored as i o."""
    stored = TRANSPOSE.then(linear(inputs, outputs)) if columns else linear(inputs, outputs)
    yield Leaf(f"{ours}/kernel", (f"{theirs}.weight",), stored)
    if bias:
        yield Leaf(f"{ours}/bias", (f"{theirs}.bias",))


def block_leaves(
    model: Any, block: str, qkv: tuple[str, ...], names: Mapping[str, str], columns: bool = False
) -> Iterator[Leaf]:
    """Yield the tables of blocks with biases, and an MLP of two linear maps.

    Args:
        block: name of a block, with its number as `{}`.
        qkv: names in it of queries, keys and values; one name: one tensor has all three.
        names: the other layers of a block, by our name.
        columns: linear maps are stored as i o.
    """
    width, hidden = model.width, model.size_of_hidden
    sizes = {"out": (width, width), "up": (width, hidden), "down": (hidden, width)}
    grouped = by_group(model.heads, model.heads)
    grouped = THIRDS.then(grouped) if len(qkv) == 1 else grouped
    kernel = grouped.then(linear(width, 3 * width))
    kernel = TRANSPOSE.then(kernel) if columns else kernel
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", block.format(i)
        kernels, biases = (
            tuple(f"{theirs}.{name}.{end}" for name in qkv) for end in ("weight", "bias")
        )
        yield Leaf(f"{ours}/qkv/kernel", kernels, kernel)
        yield Leaf(f"{ours}/qkv/bias", biases, grouped)
        for our, their in names.items():
            own, published = f"{ours}/{our}", f"{theirs}.{their}"
            if our in sizes:
                yield from linear_leaves(own, published, *sizes[our], columns=columns)
            else:
                yield from layer_norm_leaves(own, published)
