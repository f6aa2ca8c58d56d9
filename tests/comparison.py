"""How near two results are, by the size of what was summed and not by an element's own size.

An element may be what is left of a sum whose terms cancel. Its own size then says nothing of how
far another order of the terms moves it: a tolerance relative to it holds on one processor alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np


def assert_close(got: Any, want: Any, within: float, *, terms: Any = None, says: str = "") -> None:
    """Assert that no element of an array is further off than `within` x the largest term.

    Args:
        got, want: arrays of one shape, or numbers; a `want` of one number stands for each element.
        within: the tolerance, as a share.
        terms: what was summed, or the largest of it, where `want` may be the small remainder of
            large terms; by default `want` itself, whose largest element counts.
        says: what the failure begins with.
    """
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert want.shape in (got.shape, ()), f"{says}: a {got.shape} for a {want.shape}"
    largest = np.abs(np.asarray(want if terms is None else terms, np.float64)).max(initial=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=within * largest, err_msg=says)


def assert_leaves_close(got: Any, want: Any, within: float) -> None:
    """Assert that each leaf is close to its fellow of `want`, by the largest element of that."""
    named = jax.tree_util.tree_leaves_with_path(want)
    for (path, leaf), other in zip(named, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert_close(other, leaf, within, says=name)


def assert_same(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """Assert that two batches have the same arrays, of the same types."""
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name, strict=True)


def distance(got: Any, want: Any) -> float:
    """Return the 2-norm of the difference over that of `want`, over all leaves, in float64."""
    pairs = list(zip(_leaves(got), _leaves(want), strict=True))
    apart = sum(float(np.sum(np.square(a - b))) for a, b in pairs)
    whole = sum(float(np.sum(np.square(b))) for _, b in pairs)
    assert whole > 0, "nothing to be near to"
    return (apart / whole) ** 0.5


def bitwise(got: Any, want: Any) -> bool:
    """Return whether two trees of arrays hold the same bits; -0.0 is not 0.0."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in _host(pairs))


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    return (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree))


def _host(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for a, b in pairs:
        keys = jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
        yield tuple(np.asarray(jax.random.key_data(x) if keys else x) for x in (a, b))
