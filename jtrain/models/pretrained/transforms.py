"""Transforms between published tensors and parameters, each with its exact inverse.

A transform only moves numbers: both directions keep every bit. They take numpy arrays, or what
`jax.eval_shape` traces, so that shapes are known before a byte is read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

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
