"""The leaves of a state as a flat table of plain arrays, and back; how two tables differ.

A state is stored by the names of its leaves and not as a tree, so that any pytree (optax's
NamedTuples, a registered dataclass, another framework's module) comes back exactly as the one that
asks for it has it. A typed key is stored as the integers that it is made of.
"""

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core import pytree
from jtrain.core.types import Leaf, Tree
from jtrain.errors import CheckpointError
from jtrain.io.regular_files import parse_json

_SHOWN = 20  # rows of a table before "and 13 more"


def flatten(state: Any) -> dict[str, Leaf]:
    """Each leaf by its name, keys as uint32 (..., n).

    Raises:
        CheckpointError: if a leaf is no array, or two have one name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat: dict[str, Leaf] = {}
    for path, leaf in leaves:
        name = pytree.name(path)
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise CheckpointError(
                f"a checkpoint holds arrays, and {name} is {leaf!r}: make it one (jnp.asarray), or "
                f"put it beside the state (about=)."
            )
        if name in flat:
            raise CheckpointError(
                f"two leaves are both called {name}, and a checkpoint knows leaves by their names: "
                f"rename a key that has a slash in it."
            )
        flat[name] = _data(leaf)
    if not flat:
        raise CheckpointError("the state has no leaves, so there is nothing to save.")
    return flat


def unflatten(like: Tree, flat: Mapping[str, Leaf]) -> Tree:
    """The tree of `like`, with the arrays of `flat` by name."""

    def leaf(path, like_leaf):
        array = flat[pytree.name(path)]
        return (
            jax.random.wrap_key_data(array, impl=_impl(like_leaf)) if _is_key(like_leaf) else array
        )

    return jax.tree_util.tree_map_with_path(leaf, like)


def stored(described: str) -> jax.ShapeDtypeStruct:
    """What is stored for `float32[2, 3]` (as by pytree.describe); for a key, its integers.

    Raises:
        CheckpointError: if it is nothing that is described so.
    """
    try:
        dtype, _, shape = described.partition("[")
        dims = tuple(parse_json(f"[{shape}", depth=1))
        if not all(type(dim) is int and 0 <= dim < 2**63 for dim in dims):
            raise ValueError(f"{dims} is no shape")
        if dtype.startswith("key<"):
            return jax.ShapeDtypeStruct((*dims, 2 if dtype == "key<fry>" else 4), jnp.uint32)
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"a checkpoint says of a leaf that it is {described!r}, and float32[2, 3] or the like "
            f"was to stand there: it was not written by jtrain, or was changed. Take another one "
            f"of the run's checkpoints."
        ) from None


def check_same(
    found: Mapping[str, str], like: Any, where: str, *, cast: bool = False
) -> dict[str, Leaf]:
    """What to ask of a checkpoint with leaves `found` (as by pytree.describe) for `like`.

    Args:
        found: each leaf's dtype and shape, by its name.
        like: what is asked for.
        where: names the checkpoint in the message.
        cast: whether a leaf may be of another dtype; it is then asked for as it was stored.

    Raises:
        CheckpointError: with a row for each leaf that differs.
    """
    expected, asked = pytree.describe(like), flatten(like)
    for name in expected.keys() & found.keys() if cast else ():
        dtype, _, shape = found[name].partition("[")
        if expected[name].endswith(f"[{shape}") and "key<" not in dtype + expected[name]:
            expected[name] = found[name]
            at = getattr(asked[name], "sharding", None)
            asked[name] = jax.ShapeDtypeStruct(asked[name].shape, jnp.dtype(dtype), sharding=at)
    rows = []
    for name in sorted(expected.keys() | found.keys()):
        here, there = expected.get(name, "-"), found.get(name, "-")
        if here != there:
            others = (found if there == "-" else expected).keys() - (
                expected if there == "-" else found
            ).keys()
            alone = "-" in (here, there)
            near = difflib.get_close_matches(name, others, 1, 0.6) if alone else []
            rows.append((name, here, there, near[0] if near else ""))
    if rows:
        raise CheckpointError(
            f"{where} holds another state: {len(rows)} leaves differ, of {len(expected)} here and "
            f"{len(found)} there.\n{table(rows)}\n"
            f"Build the state from the config that is stored with the checkpoint, or start a new "
            f"run with this one (name=...)."
        )
    return asked


def cast_as(flat: Mapping[str, Leaf], like: Any) -> dict[str, Leaf]:
    """The arrays of `flat`, each in the dtype that it has in `like`."""
    return {name: flat[name].astype(leaf.dtype) for name, leaf in flatten(like).items()}


def table(rows: list[tuple[str, str, str, str]]) -> str:
    """The leaves that differ, a line for each of the first 20."""
    shown = [("leaf", "expected", "found", "nearest"), *rows[:_SHOWN]]
    widths = [max(len(row[column]) for row in shown) for column in range(4)]
    lines = [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in shown
    ]
    if len(rows) > _SHOWN:
        lines.append(f"  and {len(rows) - _SHOWN} more")
    return "\n".join(line.rstrip() for line in lines)


def _data(leaf: Leaf) -> Leaf:
    """The leaf as a plain array, or, for what stands for one, what stands for that."""
    if not _is_key(leaf):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl(key: Leaf) -> Any:
    """The generator of a key, or of what stands for one: only a traced key tells it."""
    seen = []
    jax.eval_shape(lambda traced: seen.append(jax.random.key_impl(traced)), key)
    return seen[0]
