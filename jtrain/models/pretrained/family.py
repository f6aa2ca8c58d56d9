"""A family of published models: how its config and its tensors become ours, and back."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jtrain.errors import CheckpointError


class Condition(NamedTuple):
    """A condition on a value, in words and as a function."""

    words: str
    holds: Callable[[Any], bool]


Supported: TypeAlias = Mapping[str, "tuple[Any, ...] | Supported"]
"""What is computed of each entry: conditions or single values, or the table of an object."""

SIZE = Condition("a whole number above 0", lambda x: type(x) is int and 0 < x < 2**31)
# A model has a part for each: a count without a bound would be built for ever.
COUNT = Condition("a whole number from 1 to 9999", lambda x: type(x) is int and 0 < x < 10_000)
NUMBER = Condition("a number above 0", lambda x: type(x) in (int, float) and 0 < x < 1e300)
FLAG = Condition("true or false", lambda x: type(x) is bool)
TEXT = Condition("a text", lambda x: isinstance(x, str))
OBJECT = Condition("an object", lambda x: isinstance(x, Mapping))


def is_list_of(*supported: Any, length: int | None = None) -> Condition:
    """Return the condition of a list of such values; None: of any length."""
    return Condition(
        f"a list of {_words(supported)}",
        lambda x: (
            isinstance(x, list | tuple)
            and length in (None, len(x))
            and all(is_supported(value, supported) for value in x)
        ),
    )


def is_supported(value: Any, supported: tuple[Any, ...]) -> bool:
    """Return whether a value is one of these, or fulfils one of the conditions."""
    return any(
        one.holds(value)
        if isinstance(one, Condition)
        else value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in supported
    )


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
        supported: the table of the family.
        file: the name of the file.
        where: the objects around the entries, each with a dot behind it.
        family: the name of the family; empty: that in the entries.
    """
    family = family or entries.get("model_type") or entries.get("architecture", "")
    for key in [key for key in supported if key in entries]:
        values, found = supported[key], entries[key]
        if isinstance(values, Mapping):
            if isinstance(found, Mapping):
                check_entries(found, values, file=file, where=f"{where}{key}.", family=family)
                continue
            values = (OBJECT, None)
        if not is_supported(found, values):
            raise CheckpointError(
                f"{file} has {where}{key}={reprlib.repr(found)}, and for the family {family} "
                f"jtrain computes only {_words(values)}. Use a model with one of these; weights "
                f"read into another function give wrong outputs."
            )


def _words(supported: tuple[Any, ...]) -> str:
    return " or ".join(x.words if isinstance(x, Condition) else repr(x) for x in supported)


Arrays: TypeAlias = tuple[Any, ...]  # numpy arrays, or tracers


@dataclasses.dataclass(frozen=True)
class Transform:
    """A parameter from published tensors, and back."""

    join: Callable[[Arrays], Any]
    """Published tensors to the parameter."""
    split: Callable[[Any], Arrays]
    """The parameter to published tensors."""

    def then(self, other: "Transform") -> "Transform":
        """Return this transform followed by another one of a single array."""
        return Transform(
            lambda arrays: other.join((self.join(arrays),)),
            lambda array: self.split(*other.split(array)),
        )


def single(forward: Callable[[Any], Any], inverse: Callable[[Any], Any]) -> Transform:
    """Return the transform of one tensor."""
    return Transform(lambda arrays: forward(*arrays), lambda array: (inverse(array),))


SAME = single(lambda x: x, lambda x: x)
TRANSPOSE = single(lambda x: x.T, lambda x: x.T)


def reshape(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Transform:
    """Return the transform of a tensor of another shape with the same order of numbers."""

    def change(x: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
        if x.shape != before:
            raise ValueError(f"{x.shape} is not {before}")
        return x.reshape(after)

    return single(lambda x: change(x, theirs, ours), lambda x: change(x, ours, theirs))


def linear(inputs: int, outputs: int) -> Transform:
    """Return the transform of o i to a kernel of `jtrain.models.layers.linear`: wide dim last."""
    return TRANSPOSE if outputs >= inputs else SAME


def from_columns(inputs: int, outputs: int) -> Transform:
    """Return the transform of i o, as GPT-2 stores linear maps, to a kernel: wide dim last."""
    return SAME if outputs >= inputs else TRANSPOSE


def by_group(heads: int, groups: int) -> Transform:
    """Return the transform of queries, keys and values, (h k) ..., to rows group by group.

    A group has its queries, then its key and its value.
    """
    shared = heads // groups

    def join(arrays: Arrays) -> Any:
        q, k, v = arrays
        each = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
        return _concatenate(each, axis=1).reshape(-1, *q.shape[1:])

    def split(x: Any) -> Arrays:
        rows = x.reshape(groups, shared + 2, -1, *x.shape[1:])
        parts = rows[:, :shared], rows[:, shared : shared + 1], rows[:, shared + 1 :]
        return tuple(part.reshape(-1, *x.shape[1:]) for part in parts)

    return Transform(join, split)


def thirds(axis: int) -> Transform:
    """Return the transform of one tensor of queries, keys and values, joined by `by_group` next.

    The tensor has its outputs at `axis`; they become the first dim.
    """

    def forward(arrays: Arrays) -> Arrays:
        (x,) = arrays
        x = x.T if axis else x
        third = x.shape[0] // 3
        return tuple(x[i * third : (i + 1) * third] for i in range(3))

    def inverse(arrays: Arrays) -> Arrays:
        x = _concatenate(arrays, axis=0)
        return (x.T if axis else x,)

    return Transform(forward, inverse)


def stack(each: Transform) -> Transform:
    """Return the transform of tensors to one with a leading dim, each of them changed first."""
    return Transform(
        lambda arrays: _stack([each.join((x,)) for x in arrays]),
        lambda array: tuple(part for i in range(len(array)) for part in each.split(array[i])),
    )


def chain(first: Transform, second: Transform) -> Transform:
    """Return `first`, whose result is a tuple of arrays, and then `second` of that tuple."""
    return Transform(
        lambda arrays: second.join(first.join(arrays)),
        lambda array: first.split(second.split(array)),
    )


def _concatenate(arrays: Sequence[Any], axis: int) -> Any:
    return _module(arrays).concatenate(arrays, axis)


def _stack(arrays: Sequence[Any]) -> Any:
    return _module(arrays).stack(arrays)


def _module(arrays: Sequence[Any]) -> Any:
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
        """Return the fields of our config for a config.json.

        Raises:
            CheckpointError: if an entry is missing, or has a value that is not computed.
        """
        hf = {**self.defaults, **hf}
        check_entries(hf, self.entries)
        return self.values(hf)


def layer_norm_leaves(ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield the scale and the bias of a LayerNorm."""
    yield Leaf(f"{ours}/scale", (f"{theirs}.weight",))
    yield Leaf(f"{ours}/bias", (f"{theirs}.bias",))


def linear_leaves(
    ours: str, theirs: str, inputs: int, outputs: int, bias: bool = True
) -> Iterator[Leaf]:
    """Yield the kernel of a linear map, and its bias."""
    yield Leaf(f"{ours}/kernel", (f"{theirs}.weight",), linear(inputs, outputs))
    if bias:
        yield Leaf(f"{ours}/bias", (f"{theirs}.bias",))


def encoder_block_leaves(
    model: Any, block: str, qkv: tuple[str, ...], names: Mapping[str, str]
) -> Iterator[Leaf]:
    """Yield the tables of the blocks of an encoder.

    Args:
        block: name of a block, with its number as `{}`.
        qkv: names in it of queries, keys and values; one name: one tensor has all three.
        names: the other layers of a block, by our name.
    """
    width, hidden = model.width, model.size_of_hidden
    sizes = {"out": (width, width), "up": (width, hidden), "down": (hidden, width)}
    grouped = by_group(model.heads, model.heads)
    grouped = chain(thirds(0), grouped) if len(qkv) == 1 else grouped
    for i in range(model.layers):
        ours, theirs = f"blocks/{i}", block.format(i)
        kernels, biases = (
            tuple(f"{theirs}.{name}.{end}" for name in qkv) for end in ("weight", "bias")
        )
        yield Leaf(f"{ours}/qkv/kernel", kernels, grouped.then(linear(width, 3 * width)))
        yield Leaf(f"{ours}/qkv/bias", biases, grouped)
        for our, their in names.items():
            if our in sizes:
                yield from linear_leaves(f"{ours}/{our}", f"{theirs}.{their}", *sizes[our])
            else:
                yield from layer_norm_leaves(f"{ours}/{our}", f"{theirs}.{their}")
