"""Published tensors as parameters: which tensor gives which, and slices of them on devices."""

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.types import Leaf as Array
from jtrain.errors import CheckpointError
from jtrain.models.pretrained.family import Family, Leaf

HEAD = "lm_head.weight"  # in all families of language models
SHOWN = 20  # rows of a table of errors


# Arrays over a mapped file, or what has their shape and dtype and is computed by np.asarray.
Tensors: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TensorTable:
    """The parameters that published tensors give."""

    leaves: Mapping[str, Leaf]
    """Row of each parameter, by our name; `theirs` are the names in the file."""
    found: Mapping[str, jax.ShapeDtypeStruct]
    """Shape and dtype of each parameter."""
    tensors: Tensors

    def read(self, name: str) -> "ParameterView":
        """Return a parameter, of which slices are read."""
        leaf = self.leaves[name]
        arrays = tuple(np.asarray(self.tensors[theirs]) for theirs in leaf.theirs)
        view = ParameterView(leaf.transform.join(arrays)[0], arrays)
        view.let_go()
        return view


def make_table(family: Family, model: Any, tensors: Tensors, where: str) -> TensorTable:
    """Match the tensors of a file with the table of a family, for our config `model`.

    Raises:
        CheckpointError: with each tensor that is missing, not known, or of another shape.
    """
    bare = lambda name: name.removeprefix(family.prefix)  # some files leave it out
    names = {family.rename(model, bare(name)): name for name in tensors}
    shapes = published_shapes(family, model)
    rows, leaves, used = [], {}, set()
    for leaf in family.leaves(model):
        used |= set(map(bare, leaf.theirs))
        for theirs in leaf.theirs:
            found, shape = tensors.get(names.get(bare(theirs), "")), shapes[theirs].shape
            if found is None:
                rows.append((theirs, "is missing"))
            elif found.shape != shape:
                words = [" x ".join(map(str, x)) or "a number" for x in (found.shape, shape)]
                rows.append((theirs, f"is {words[0]}, and config.json says {words[1]}"))
            elif not jnp.issubdtype(found.dtype, jnp.floating):
                rows.append((theirs, f"is {found.dtype}, and a weight is a floating number"))
        leaves[leaf.ours] = leaf._replace(
            theirs=tuple(names.get(bare(theirs), theirs) for theirs in leaf.theirs)
        )
    tied = (HEAD,) if getattr(model, "tied", False) else ()  # repeats the embedding
    surplus = family.surplus(model)
    unknown = [
        name
        for name in names
        if name not in used
        and not name.endswith((*family.ignored, *tied))
        and not name.startswith(surplus)
    ]
    rows += [(names[name], "is surplus: the model has no place for it") for name in unknown]
    if rows:
        raise CheckpointError(_message(family, where, rows))
    found = {name: _shape(leaf, tensors) for name, leaf in leaves.items()}
    return TensorTable(leaves, found, tensors)


def published_shapes(family: Family, model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and the dtype of each published tensor of a model."""
    like, shapes = model_shapes(model), {}
    for leaf in family.leaves(model):
        parts = jax.eval_shape(leaf.transform.split, (like[leaf.ours],))
        shapes |= dict(zip(leaf.theirs, parts, strict=True))
    return shapes


def model_shapes(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parameters of a model by name, block by block; other arrays as extra/NAME."""
    from jtrain.core.pytree import named_leaves
    from jtrain.models.layers.block_stack import unstack_layers

    params, extra = jax.eval_shape(model.build().init, jax.random.key(0))
    params = jax.eval_shape(unstack_layers, params) if getattr(model, "scan", False) else params
    extras = {f"extra/{name}": leaf for name, leaf in named_leaves(extra).items()}
    return {**named_leaves(params), **extras}


def _shape(leaf: Leaf, tensors: Tensors) -> jax.ShapeDtypeStruct:
    arrays = (tensors[theirs] for theirs in leaf.theirs)
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return jax.eval_shape(leaf.transform.join, structs)[0]


def _message(family: Family, where: str, rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows[:SHOWN])
    lines = [
        f"{where} has {len(rows)} tensors that do not fit the {family.name} of config.json:",
        *(f"  {name:{width}}  {words}" for name, words in rows[:SHOWN]),
        *([f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []),
        "Download the folder again, or correct config.json if it belongs to another model.",
    ]
    return "\n".join(lines)


CHUNK = 1 << 23
"""Bytes that are copied before the pages of the file are let go."""

Index: TypeAlias = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class ParameterView:
    """A parameter as a view of mapped tensors, where its transform moves no bytes."""

    array: np.ndarray
    tensors: Sequence[np.ndarray]
    """The published tensors that the parameter is made from."""

    def copy(self, index: Index, out: np.ndarray) -> None:
        """Copy a slice to `out`, cast to its dtype; let go of the pages of the files."""
        part, out = np.atleast_1d(self.array[index]), np.atleast_1d(out)
        # Along the dim with the largest step, so that each page is read in few chunks.
        dim = int(np.argmax(part.strides))
        rows = max(1, CHUNK * part.shape[dim] // max(part.nbytes, 1))
        for first in range(0, part.shape[dim], rows):
            chunk = (*(slice(None),) * dim, slice(first, first + rows))
            out[chunk] = part[chunk]
            self.let_go()

    def let_go(self) -> None:
        """Tell the system that the pages of mapped files are not needed: they are on the disk."""
        _let_go(self.tensors)


def _let_go(tensors: Sequence[np.ndarray]) -> None:
    for tensor in tensors:
        base: Any = tensor
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
            base.madvise(mmap.MADV_DONTNEED)


def put_slices(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Index], np.ndarray]
) -> Array:
    """Make an array of slices, of which one is on the host at a time; replicas are read once."""
    devices: dict[str, list[Any]] = {}
    indices = sharding.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        devices.setdefault(str(index), []).append(device)
    arrays = []
    for same in devices.values():
        index = indices[same[0]]
        assert index is not None, "the device is addressable"
        host = read(index)
        for device in same:
            single = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(host, single))
        jax.block_until_ready(arrays[-len(same) :])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def release_host_memory() -> None:
    """Return memory that was freed to the system.

    JAX drops its references to host arrays at the next transfer. glibc keeps what is freed between
    arrays that live: 220 MB after a model of 1.3 GB.
    """
    jax.device_put(np.zeros((), np.int8), jax.local_devices()[0])
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
