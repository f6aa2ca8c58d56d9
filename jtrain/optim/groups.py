"""Which leaves an optimizer treats how: patterns on leaf names, such as `*/embed/*`.

A name is what `jtrain.core.pytree.name` gives, `blocks/0/mlp/kernel` say. In a pattern `*` stands
for any characters, slashes too, `?` for one and `[ab]` for one of these; a leading `*/` also
matches at the top, so `*/embed/*` finds `embed/table`.
"""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError


@configclass
class ParamGroup:
    """Leaves that are trained in a way of their own; a leaf is of the first group that matches."""

    match: str = Field(min_length=1)
    """Pattern on leaf names: `*/embed/*`."""
    lr: float = Field(default=1.0, ge=0)
    """Factor on the optimizer's learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of every leaf of the group; null leaves it to the optimizer's own rules."""
    freeze: bool = False
    """Whether the leaves stay as they are: no update, no decay, no optimizer state."""


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` names the leaf `name`."""
    return fnmatchcase(name, pattern) or fnmatchcase(f"/{name}", pattern)


def group_of(name: str, groups: Sequence[ParamGroup]) -> ParamGroup | None:
    """The first group whose pattern names the leaf, if any."""
    return next((group for group in groups if matches(name, group.match)), None)


def check_patterns(
    names: Iterable[str], groups: Sequence[ParamGroup], decay: Sequence[str]
) -> None:
    """Makes sure that every pattern does something.

    Raises:
        ConfigError: if a pattern names no leaf (the message has the nearest names), if earlier
            groups hold all leaves of a group, or if every leaf is frozen.
    """
    names = list(names)
    for i, pattern in enumerate(decay):
        check_pattern(f"optimizer.decay[{i}]", pattern, names)
    owners = {name: group_of(name, groups) for name in names}
    for i, group in enumerate(groups):
        check_pattern(f"optimizer.groups[{i}].match", group.match, names)
        if not any(owner is group for owner in owners.values()):
            raise ConfigError(
                f"optimizer.groups[{i}] ({group.match}) holds no leaf, because earlier groups hold "
                f"all that it names and the first match counts: move it up, before "
                f"{_first_owner(group, owners)}."
            )
    if names and all(owner is not None and owner.freeze for owner in owners.values()):
        raise ConfigError(
            f"optimizer.groups freezes all {len(names)} leaves, so that nothing is trained: "
            f"narrow a match, or set freeze: false in one."
        )


def check_pattern(where: str, pattern: str, names: Sequence[str]) -> None:
    """Makes sure that a pattern names a leaf; `where` is the key that it was typed at.

    Raises:
        ConfigError: with the nearest names, if it names none.
    """
    if not any(matches(name, pattern) for name in names):
        near = nearest(pattern, names) or ["*"]
        raise ConfigError(
            f"{where} is {pattern!r}, which matches none of the {len(names)} leaves. "
            f"Nearest: {', '.join(near)}. Write one ({near[0]!r}) or a pattern of several."
        )


def nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The `count` names most like the pattern, as a whole or in one of their parts."""
    core = pattern.replace("*", "").strip("/")

    def likeness(name: str) -> float:
        parts = [name, *name.split("/")]
        return max(difflib.SequenceMatcher(None, core, part).ratio() for part in parts)

    return sorted(names, key=likeness, reverse=True)[:count]


def _first_owner(group: ParamGroup, owners: dict[str, ParamGroup | None]) -> str:
    taken = (owner for name, owner in owners.items() if owner and matches(name, group.match))
    return next(owner.match for owner in taken)
