"""Groups of parameters with their own settings, by patterns on leaf names such as `*/embed/*`.

Names are those of `jtrain.core.pytree.name`, such as `blocks/0/mlp/kernel`. In a pattern `*` stands
for any characters, slashes too, `?` for one character and `[ab]` for a or b; a leading `*/` also
matches at the top, so `*/embed/*` finds `embed/table`.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core import pytree
from jtrain.core.types import Dims, Leaf, Params
from jtrain.errors import ConfigError


@configclass
class ParamGroup:
    """Leaves with their own settings; the first group that matches a leaf applies."""

    match: str = Field(min_length=1)
    """Pattern on leaf names: `*/embed/*`."""
    lr_factor: float = Field(default=1.0, ge=0)
    """Factor on the optimizer's learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of every leaf of the group; null: the optimizer's rules."""
    freeze: bool = False
    """Freeze the leaves: no update, no decay, no optimizer state. A run whose `build`
    returns `optimizer=self.optimizer` computes no gradient of theirs, and logs the others' norm."""


def matches(name: str, pattern: str) -> bool:
    """Return whether `pattern` matches the leaf `name`."""
    return fnmatchcase(name, pattern) or fnmatchcase(f"/{name}", pattern)


def group_of(name: str, groups: Sequence[ParamGroup]) -> ParamGroup | None:
    """Return the first group whose pattern matches the leaf, if any."""
    return next((group for group in groups if matches(name, group.match)), None)


def check_patterns(
    names: Iterable[str], groups: Sequence[ParamGroup], decay: Sequence[str]
) -> None:
    """Raise unless every pattern has an effect.

    Raises:
        ConfigError: if a pattern matches no leaf (the message has the nearest names), if earlier
            groups match all leaves of a group, or if every leaf is frozen.
    """
    names = list(names)
    for i, pattern in enumerate(decay):
        check_pattern(f"optimizer.decay[{i}]", pattern, names)
    owners = {name: group_of(name, groups) for name in names}
    for i, group in enumerate(groups):
        check_pattern(f"optimizer.groups[{i}].match", group.match, names)
        if not any(owner is group for owner in owners.values()):
            raise ConfigError(
                f"optimizer.groups[{i}] ({group.match}) has no leaf, because earlier groups match "
                f"all of its leaves and the first match counts: move it up, before "
                f"{_first_owner(group, owners)}."
            )
    if names and all(owner is not None and owner.freeze for owner in owners.values()):
        raise ConfigError(
            f"optimizer.groups freezes all {len(names)} leaves, so that nothing is trained: "
            f"narrow a match, or set freeze: false in a group."
        )


def check_pattern(where: str, pattern: str, names: Sequence[str]) -> None:
    """Raise unless a pattern matches a leaf; `where` is the pattern's config key."""
    if not any(matches(name, pattern) for name in names):
        near = nearest(pattern, names) or ["*"]
        raise ConfigError(
            f"{where} is {pattern!r}, which matches none of the {len(names)} leaves. "
            f"Nearest: {', '.join(near)}. Write one ({near[0]!r}) or a pattern of several."
        )


def nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """Return the `count` names most similar to the pattern, or with the most similar parts."""
    core = pattern.replace("*", "").strip("/")

    def similarity(name: str) -> float:
        parts = [name, *name.split("/")]
        return max(difflib.SequenceMatcher(None, core, part).ratio() for part in parts)

    return sorted(names, key=similarity, reverse=True)[:count]


def _first_owner(group: ParamGroup, owners: dict[str, ParamGroup | None]) -> str:
    taken = (owner for name, owner in owners.items() if owner and matches(name, group.match))
    return next(owner.match for owner in taken)


LAYERS = "layers"  # the name of the stacked dim in `Model.dims`


def stacked_dims(name: str, dims: Mapping[str, Dims]) -> int:
    """Return how many leading dims of the leaf `name` stack layers."""
    named = dims.get(name, ())
    return next((i for i, dim in enumerate(named) if dim != LAYERS), len(named))


def layer_ndim(name: str, leaf: Leaf, dims: Mapping[str, Dims]) -> int:
    """Return the number of dims that one layer of the leaf `name` has."""
    return leaf.ndim - stacked_dims(name, dims)


def layerwise(
    transformation: optax.GradientTransformation, dims: Mapping[str, Dims]
) -> optax.GradientTransformation:
    """Apply a `transformation` without state to each layer of each leaf.

    The state stays optax's own, so that checkpoints keep their structure.
    """

    def update(updates: Params, state: Any, params: Params | None = None):
        def update_leaf(path: tuple[Any, ...], u: Leaf, *p: Leaf) -> Leaf:
            update_layer = lambda u, *p: transformation.update(u, state, *p)[0]
            for _ in range(stacked_dims(pytree.name(path), dims)):
                update_layer = jax.vmap(update_layer)
            return update_layer(u, *p)

        rest = () if params is None else (params,)
        return jax.tree_util.tree_map_with_path(update_leaf, updates, *rest), state

    return optax.GradientTransformation(transformation.init, update)
