"""Leaf tables: the leaves of a state as a flat table of plain arrays, and their differences.

A state is stored by the names of its leaves and not as a tree, so that any pytree (optax's
NamedTuples, a registered dataclass, another framework's module) is restored with the structure of
the request. A typed key is stored as its integers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core import pytree
from jtrain.core.types import Leaf, Tree
from jtrain.errors import CheckpointError
from jtrain.errors.spelling import nearest_name
from jtrain.io.formatting import align_columns
from jtrain.io.regular_files import parse_json

_SHOWN = 20  # rows of a table before "and 13 more"


def flatten(state: Any) -> dict[str, Leaf]:
    """Return each leaf by its name, keys as uint32 (..., n).

    Raises:
        CheckpointError: if a leaf is not an array, or two leaves have one name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat: dict[str, Leaf] = {}
    for path, leaf in leaves:
        name = pytree.name(path)
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise CheckpointError(
                f"a checkpoint holds arrays, and {name} is {leaf!r}: convert it (jnp.asarray), or "
                f"put it beside the state (about=)."
            )
        if name in flat:
            raise CheckpointError(
                f"two leaves are both called {name}, and a checkpoint stores leaves by name: "
                f"rename a key that contains a slash."
            )
        flat[name] = _plain_leaf(leaf)
    if not flat:
        raise CheckpointError("the state has no leaves: there is nothing to save.")
    return flat


def unflatten(abstract: Tree, flat: Mapping[str, Leaf]) -> Tree:
    """Return a tree with the structure of `abstract` and the arrays of `flat`."""

    def leaf(path, like_leaf):
        array = flat[pytree.name(path)]
        return (
            jax.random.wrap_key_data(array, impl=_impl(like_leaf)) if _is_key(like_leaf) else array
        )

    return jax.tree_util.tree_map_with_path(leaf, abstract)


def parse_leaf(described: str) -> jax.ShapeDtypeStruct:
    """Parse the shape and dtype of a stored leaf, `float32[2, 3]`; for a key, of its integers.

    Raises:
        CheckpointError: if the text describes no leaf.
    """
    try:
        dtype, _, shape = described.partition("[")
        dims = tuple(parse_json(f"[{shape}", depth=1))
        if not all(type(dim) is int and 0 <= dim < 2**63 for dim in dims):
            raise ValueError(f"{dims} is not a shape")
        if dtype.startswith("key<"):
            return jax.ShapeDtypeStruct((*dims, 2 if dtype == "key<fry>" else 4), jnp.uint32)
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"a checkpoint describes a leaf as {described!r}, and not like float32[2, 3]: the "
            f"checkpoint was not written by jtrain, or was changed. Use another checkpoint of the "
            f"run."
        ) from None


def check_same(
    found: Mapping[str, str], abstract: Any, where: str, *, cast: bool = False
) -> dict[str, Leaf]:
    """Check that a checkpoint has the leaves of `abstract`, and return what to request from it.

    Args:
        found: the dtype and shape of each stored leaf (of pytree.describe), by its name.
        where: names the checkpoint in the message.
        cast: allow other dtypes; such a leaf is then requested as stored.

    Raises:
        CheckpointError: with a row for each leaf that differs.
    """
    expected, requested = pytree.describe(abstract), flatten(abstract)
    for name in expected.keys() & found.keys() if cast else ():
        dtype, _, shape = found[name].partition("[")
        if expected[name].endswith(f"[{shape}") and "key<" not in dtype + expected[name]:
            expected[name] = found[name]
            sharding = getattr(requested[name], "sharding", None)
            requested[name] = jax.ShapeDtypeStruct(
                requested[name].shape, jnp.dtype(dtype), sharding=sharding
            )
    rows = []
    for name in sorted(expected.keys() | found.keys()):
        want, saved = expected.get(name, "-"), found.get(name, "-")
        if want != saved:
            one, other = (found, expected) if saved == "-" else (expected, found)
            others = one.keys() - other.keys()
            unmatched = "-" in (want, saved)
            near = nearest_name(name, others) if unmatched else ""
            rows.append((name, want, saved, near))
    if rows:
        raise CheckpointError(
            f"{where} holds another state: {len(rows)} leaves differ, of {len(expected)} expected "
            f"and {len(found)} stored.\n{format_rows(rows)}\n"
            f"Build the state from the config in the checkpoint, or start a new run with this "
            f"config (name=...)."
        )
    return requested


def cast_like(flat: Mapping[str, Leaf], abstract: Any) -> dict[str, Leaf]:
    """Cast the arrays of `flat` to the dtypes of `abstract`."""
    return {name: flat[name].astype(leaf.dtype) for name, leaf in flatten(abstract).items()}


def format_rows(rows: list[tuple[str, str, str, str]]) -> str:
    """Format differing leaves, a line for each of the first 20."""
    shown = [("leaf", "expected", "found", "nearest"), *rows[:_SHOWN]]
    lines = align_columns(shown, right=())
    lines += [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "\n".join(f"  {line}" for line in lines)


def _plain_leaf(leaf: Leaf) -> Leaf:
    """Return the leaf as a plain array; for a ShapeDtypeStruct, as one of plain dtype."""
    if not _is_key(leaf):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl(key: Leaf) -> Any:
    """Return the generator of a key or of its ShapeDtypeStruct: only a traced key has it."""
    impls = []
    jax.eval_shape(lambda traced: impls.append(jax.random.key_impl(traced)), key)
    return impls[0]
