"""Which leaves of a new state are taken from an origin, told before any is read."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.checkpoint.leaf_table import table
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.checkpoint.weights_source import WeightsSource, find, place
from jtrain.config.init_from import InitFrom
from jtrain.core import pytree
from jtrain.core.types import Extra, Leaf, Params
from jtrain.errors import CheckpointError, ConfigError
from jtrain.optim.groups import matches, nearest

SHOWN = 20  # lines of each kind before "and 13 more"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """What `init_from` comes to for one model; nothing is read yet."""

    origin: WeightsSource
    taken: Mapping[str, str]
    """The name there of each leaf that is taken, by its name here."""
    turned: frozenset[str]
    """Those of them whose dims are reversed there."""
    left: tuple[str, ...]
    """Leaves here that are not asked for."""
    missing: tuple[str, ...]
    """Leaves here that are asked for, and are not there."""
    unused: tuple[str, ...]
    """Leaves there that nothing here takes."""
    here: Mapping[str, Leaf]
    """What each leaf here is."""

    def lines(self) -> list[str]:
        """A table of what is loaded, left alone and missing."""
        numbers = sum(self.here[name].size for name in self.taken)
        head = (
            f"starts from {self.origin.where}: {len(self.taken)} leaves loaded ({numbers:,} "
            f"numbers), {len(self.left)} left alone, {len(self.missing)} missing, "
            f"{len(self.unused)} there not used"
        )
        loaded = [f"{name}  {self._how(name)}".rstrip() for name in self.taken]
        return [
            head,
            *_told("loaded", loaded),
            *_told("left alone", self.left),
            *_told("missing", self.missing),
            *_told("not used", self.unused),
        ]

    def read(self, weights: tuple[Params, Extra]) -> tuple[Params, Extra]:
        """`weights` with the leaves that are taken, each straight in the sharding it has there."""
        here = _named(*weights)
        of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        straight = {there: of(here[n]) for n, there in self.taken.items() if n not in self.turned}
        # A transposed leaf comes by the host: its parts there are no parts here.
        turned = {self.taken[n]: self.origin.found[self.taken[n]] for n in self.turned}
        read = self.origin.read({**straight, **turned})
        new = {n: read[there] for n, there in self.taken.items() if n not in self.turned}
        new |= {n: place(read[self.taken[n]].T, of(here[n])) for n in self.turned}
        params, extra = weights
        pick = lambda prefix: lambda path, leaf: new.get(prefix + pytree.name(path), leaf)
        return (
            jax.tree_util.tree_map_with_path(pick(""), params),
            jax.tree_util.tree_map_with_path(pick("extra/"), extra),
        )

    def _how(self, name: str) -> str:
        there = self.taken[name]
        before, after = self.origin.found[there].dtype, self.here[name].dtype
        said = f"from {there}" if there != name else ""
        said += ", transposed" * (name in self.turned)
        return said + f", {before} to {after}" * (before != after)


def starting(
    asked: InitFrom,
    params: Params,
    extra: Extra,
    owner_of: Callable[[Path], RunIdentity | None] = lambda run: None,
) -> WeightsPlan:
    """What `asked` comes to for a model with leaves like these; `owner_of` is as `find` takes it.

    Raises:
        CheckpointError: if there is nothing at the path, or leaves do not fit, with all of them.
        ConfigError: if a pattern or a rename matches nothing.
    """
    origin = find(asked.path, asked.step, owner_of)
    here = _named(params, extra) if asked.extra else _named(params, ())
    found = {n: leaf for n, leaf in origin.found.items() if asked.extra or not _beside(n)}
    _check("include", asked.include, here)
    _check("exclude", asked.exclude, here)
    _check("transpose", asked.transpose, here)
    _check("rename", [there for there, _ in asked.rename], found)
    there_by_name = _renamed(found, asked.rename)
    wanted = [n for n in here if _any(n, asked.include) and not _any(n, asked.exclude)]
    taken = {name: there_by_name[name] for name in wanted if name in there_by_name}
    turned = frozenset(name for name in taken if _any(name, asked.transpose))
    missing = tuple(name for name in wanted if name not in taken)
    unused = sorted(found.keys() - taken.values())
    start = WeightsPlan(
        origin=origin,
        taken=taken,
        turned=turned,
        left=tuple(name for name in here if name not in wanted),
        missing=missing,
        unused=tuple(unused),
        here=here,
    )
    _refuse_misfits(start, asked, there_by_name)
    return start


def _refuse_misfits(start: WeightsPlan, asked: InitFrom, there_by_name: Mapping[str, str]) -> None:
    rows = []
    free = [name for name, there in there_by_name.items() if there in start.unused]
    for name, there in start.taken.items():
        want, found = start.here[name], start.origin.found[there]
        shape = found.shape[::-1] if name in start.turned else found.shape
        if shape != want.shape or not _same_kind(found.dtype, want.dtype):
            hint = "transposed" if found.shape[::-1] == want.shape != shape else ""
            rows.append((name, _said(want), _said(found), hint))
    if not asked.partial or not start.taken:
        for name in start.missing:
            near = difflib.get_close_matches(name, free, 1, 0.6)
            rows.append((name, _said(start.here[name]), "-", near[0] if near else ""))
    if rows:
        raise CheckpointError(
            f"init_from.path={asked.path} was to give {len(start.taken) + len(start.missing)} "
            f"leaves, and {len(rows)} do not fit what is in {start.origin.where}:\n{table(rows)}\n"
            f"Call what is there as it is called here (init_from.rename), reverse its dims "
            f"(init_from.transpose), leave leaves out (init_from.exclude), or start what is "
            f"missing by the seed (init_from.partial=true)."
        )


def _renamed(found: Iterable[str], renames: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The name there, by the name that it gets here."""
    by_name: dict[str, str] = {}
    for there in found:
        name = next((new for pair in renames if (new := _rename(there, *pair))), there)
        if name in by_name:
            raise ConfigError(
                f"init_from.rename calls two leaves {name}: {by_name[name]} and {there}. Give one "
                f"of them another name, or put a pair for it before the others."
            )
        by_name[name] = there
    return by_name


def _rename(name: str, there: str, here: str) -> str:
    """`name` as `here` says, if it is as `there` says; else nothing."""
    stars = re.fullmatch("(.*?)".join(map(re.escape, there.split("*"))), name)
    if stars is None:
        return ""
    first, *rest = here.split("*")
    return first + "".join(s + text for s, text in zip(stars.groups(), rest, strict=True))


def _check(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for i, pattern in enumerate(patterns):
        hit = any(_rename(n, pattern, pattern) if key == "rename" else matches(n, pattern)
                  for n in names)  # fmt: skip
        if not hit:
            near = nearest(pattern, names) or ["*"]
            side = "there" if key == "rename" else "of this model"
            raise ConfigError(
                f"init_from.{key}[{i}] is {pattern!r}, which matches none of the {len(names)} "
                f"leaves {side}. Nearest: {', '.join(near)}. Write one ({near[0]!r}) or a pattern "
                f"of several."
            )


def _named(params: Params, extra: Extra) -> dict[str, Leaf]:
    beside = {f"extra/{name}": leaf for name, leaf in pytree.named_leaves(extra).items()}
    return {**pytree.named_leaves(params), **beside}


def _beside(name: str) -> bool:
    return name.startswith("extra/")


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _same_kind(one: Any, other: Any) -> bool:
    """Whether numbers of a type can stand for those of another: floats for floats."""
    return one == other or all(jnp.issubdtype(t, jnp.floating) for t in (one, other))


def _said(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _told(what: str, lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"  {what:10}  {line}" for line in [*lines[:SHOWN], *more]]
