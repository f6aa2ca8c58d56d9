"""Initial weights: their sources, and the leaves of a new state that come from one."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import directory_entries, inspect, layout, leaf_table, storage
from jtrain.checkpoint.leaf_table import format_rows
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.sections import InitFrom
from jtrain.config.top import RUNS
from jtrain.core import pytree
from jtrain.core.types import Extra, Leaf, Params
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError
from jtrain.errors.spelling import nearest_name
from jtrain.io.hub import is_hub_name
from jtrain.io.object_store import is_address
from jtrain.io.safetensors import INDEX_SUFFIX, SUFFIX, read_tensors
from jtrain.models.pretrained.folder import check_no_pickle
from jtrain.models.pretrained.source import PretrainedWeights, is_pretrained
from jtrain.optim.groups import matches, nearest


@runtime_checkable
class WeightsSource(Protocol):
    """Source of arrays by name."""

    where: str
    """Name in messages."""
    found: Mapping[str, jax.ShapeDtypeStruct]
    """Shape and dtype of each array. Values beside the parameters are named extra/NAME."""

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Read these arrays with the requested shardings and dtypes; numpy without a sharding."""
        ...


class TensorFile:
    """Tensors of a file, with slashes for the dots in their names."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._arrays = {name.replace(".", "/"): array for name, array in read_tensors(path).items()}
        self.found: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self._arrays.items()
        }

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Read each shard once, for its device."""
        return {name: place_array(self._arrays[name], leaf) for name, leaf in wanted.items()}


class CheckpointWeights:
    """Parameters of a checkpoint, and its other values (extra/)."""

    def __init__(self, directory: Path, step: int):
        layout.check_valid(directory, step)
        record = layout.read_record(directory, step)
        self.where = str(directory / str(step))
        self._directory, self._step = directory, step
        self._stored = {_name(stored): stored for stored in record["leaves"] if _name(stored)}
        described = {name: record["leaves"][stored] for name, stored in self._stored.items()}
        self.found: Mapping[str, jax.ShapeDtypeStruct] = {
            name: leaf_table.parse_leaf(text)
            for name, text in described.items()
            if not text.startswith("key<")
        }

    def read(self, wanted: Mapping[str, Leaf], /) -> dict[str, Leaf]:
        """Read directly from the disk into the requested shardings."""
        abstract = {self._stored[name]: leaf for name, leaf in wanted.items()}
        path = Path(self._directory).absolute() / str(self._step) / layout.STATE
        try:
            flat = storage.read(path, abstract, some=True)
        except storage.UnreadableError as error:
            raise layout.damaged_error(self._directory, self._step, str(error)) from None
        return {name: flat[self._stored[name]] for name in wanted}


def open_source(
    path: str,
    step: Literal["newest", "best"] = "newest",
    owner_of: Callable[[Path], RunIdentity | None] = lambda run: None,
    *,
    stacked: bool = False,
) -> WeightsSource:
    """Open the source at `path`: a run, a checkpoint, a file of tensors or a published model.

    What is on this disk comes before a name on the Hub.

    Args:
        path: as `init_from.path`.
        step: which checkpoint of a run.
        owner_of: returns the required owner of the checkpoints in the directory of a run; those of
            others are skipped. By default any owner is accepted.
        stacked: the blocks of a published model are requested as one array each.

    Raises:
        CheckpointError: if the path is none of them, or the run has no such checkpoint.
    """
    if is_address(path):
        raise CheckpointError(
            f"init_from.path={path} is in an object store, and parameters are read from this disk. "
            f"Fetch the run, and name its local copy: jtrain ckpt fetch {path}"
        )
    if path.endswith((SUFFIX, INDEX_SUFFIX)):
        return TensorFile(Path(path))
    check_no_pickle(Path(path))
    if is_pretrained(Path(path)):
        return PretrainedWeights(Path(path), stacked=stacked)
    try:
        directory, named = inspect.find_checkpoint(path)
    except directory_entries.OutsideError:
        raise
    except CheckpointError as error:
        if is_hub_name(path) and Path(path).parts[0] != RUNS.name:
            return PretrainedWeights(path, stacked=stacked)
        raise CheckpointError(
            f"init_from.path={error} Or name a file of tensors ({SUFFIX}), a folder with "
            f"config.json, or org/name of the Hub."
        ) from None
    if named is not None:
        return CheckpointWeights(directory, named)
    owner = owner_of(directory.parent)
    # The run may save meanwhile: every process uses the step that the first one found.
    search = lambda: {"step": inspect.resolve_step(directory, step, owner, "init_from.step=")}
    return CheckpointWeights(directory, broadcast_from_first(search)["step"])


def place_array(array: np.ndarray, abstract: Leaf) -> Leaf:
    """Cast and shard `array` like `abstract`, each device with its own shard."""
    sharding = getattr(abstract, "sharding", None)
    if sharding is None:
        return array.astype(abstract.dtype)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.array(array[index], abstract.dtype)
    )


def _name(stored: str) -> str:
    """Return `blocks/0/kernel` for `params/blocks/0/kernel`; empty for a leaf outside the model."""
    group, _, name = stored.partition("/")
    return {"params": name, "extra": stored}.get(group, "")


SHOWN = 20  # lines of each kind before "and 13 more"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """Plan of `init_from` for one model; nothing is read yet."""

    source: WeightsSource
    loaded: Mapping[str, str]
    """Loaded leaves: the name in the source, by the name in the model."""
    transposed: frozenset[str]
    """Loaded leaves whose dims the source has in reverse order."""
    left: tuple[str, ...]
    """Leaves of the model that are not requested."""
    missing: tuple[str, ...]
    """Requested leaves of the model that the source lacks."""
    unused: tuple[str, ...]
    """Leaves of the source that the model does not use."""
    leaves: Mapping[str, Leaf]
    """Leaves of the model."""

    def lines(self) -> list[str]:
        """Return a table of what is loaded, left alone, missing and unused."""
        numbers = sum(self.leaves[name].size for name in self.loaded)
        head = (
            f"starts from {self.source.where}: {len(self.loaded)} leaves loaded ({numbers:,} "
            f"numbers), {len(self.left)} left alone, {len(self.missing)} missing, "
            f"{len(self.unused)} in the source not used"
        )
        loaded = [f"{name}  {self._describe(name)}".rstrip() for name in self.loaded]
        return [
            head,
            *_rows("loaded", loaded),
            *_rows("left alone", self.left),
            *_rows("missing", self.missing),
            *_rows("not used", self.unused),
        ]

    def covers(self, params: Params, extra: Extra) -> bool:
        """Return whether every leaf is loaded, so that none needs an initial value."""
        return _named(params, extra).keys() <= self.loaded.keys()

    def read(self, weights: tuple[Params, Extra]) -> tuple[Params, Extra]:
        """Read the loaded leaves into `weights`, each directly in its sharding.

        Where the plan `covers` them, shapes with shardings do for `weights`.
        """
        leaves = _named(*weights)
        direct = {n: stored for n, stored in self.loaded.items() if n not in self.transposed}
        # A transposed leaf goes through the host: shards of the source are not shards of the leaf.
        requests = {stored: _struct(leaves[n]) for n, stored in direct.items()}
        requests |= {self.loaded[n]: self.source.found[self.loaded[n]] for n in self.transposed}
        arrays = self.source.read(requests)
        new = {n: arrays[stored] for n, stored in direct.items()}
        new |= {
            n: place_array(arrays[self.loaded[n]].T, _struct(leaves[n])) for n in self.transposed
        }

        def replace(prefix: str, tree: Any) -> Any:
            replacement = lambda path, leaf: new.get(prefix + pytree.name(path), leaf)
            return jax.tree_util.tree_map_with_path(replacement, tree)

        params, extra = weights
        return replace("", params), replace("extra/", extra)

    def _describe(self, name: str) -> str:
        stored = self.loaded[name]
        before, after = self.source.found[stored].dtype, self.leaves[name].dtype
        text = f"from {stored}" if stored != name else ""
        text += ", transposed" * (name in self.transposed)
        return text + f", {before} to {after}" * (before != after)


def plan_weights(
    init_from: InitFrom,
    params: Params,
    extra: Extra,
    owner_of: Callable[[Path], RunIdentity | None] = lambda run: None,
) -> WeightsPlan:
    """Plan `init_from` for a model with these leaves; `owner_of` is as in `find`.

    Raises:
        CheckpointError: if nothing is at the path, or leaves do not fit, with all of them.
        ConfigError: if a pattern or a rename matches nothing.
    """
    leaves = _named(params, extra) if init_from.extra else _named(params, ())
    source = open_source(init_from.path, init_from.step, owner_of, stacked=_stacked(leaves))
    found = {
        n: leaf for n, leaf in source.found.items() if init_from.extra or not n.startswith("extra/")
    }
    _check_patterns("include", init_from.include, leaves)
    _check_patterns("exclude", init_from.exclude, leaves)
    _check_patterns("transpose", init_from.transpose, leaves)
    _check_patterns("rename", [pattern for pattern, _ in init_from.rename], found)
    stored = _stored_names(found, init_from.rename)
    requested = [name for name in leaves if is_requested(name, init_from)]
    loaded = {name: stored[name] for name in requested if name in stored}
    plan = WeightsPlan(
        source=source,
        loaded=loaded,
        transposed=frozenset(name for name in loaded if _any(name, init_from.transpose)),
        left=tuple(name for name in leaves if name not in requested),
        missing=tuple(name for name in requested if name not in loaded),
        unused=tuple(sorted(found.keys() - loaded.values())),
        leaves=leaves,
    )
    _check_fit(plan, init_from, stored)
    return plan


def is_requested(name: str, init_from: InitFrom) -> bool:
    """Return whether a leaf of the model is to come from the source; else it starts by the seed."""
    return _any(name, init_from.include) and not _any(name, init_from.exclude)


def _check_fit(plan: WeightsPlan, init_from: InitFrom, stored: Mapping[str, str]) -> None:
    rows = []
    unused = [name for name, in_source in stored.items() if in_source in plan.unused]
    for name, in_source in plan.loaded.items():
        want, found = plan.leaves[name], plan.source.found[in_source]
        shape = found.shape[::-1] if name in plan.transposed else found.shape
        if shape != want.shape or not _same_kind(found.dtype, want.dtype):
            hint = "transposed" if found.shape[::-1] == want.shape != shape else ""
            rows.append((name, _describe_leaf(want), _describe_leaf(found), hint))
    if not init_from.partial or not plan.loaded:
        for name in plan.missing:
            rows.append((name, _describe_leaf(plan.leaves[name]), "-", nearest_name(name, unused)))
    if rows:
        raise CheckpointError(
            f"init_from.path={init_from.path} should give {len(plan.loaded) + len(plan.missing)} "
            f"leaves, and {len(rows)} do not fit the source "
            f"{plan.source.where}:\n{format_rows(rows)}\n{_likely_cause(rows)}"
            f"Rename leaves of the source (init_from.rename), reverse their dims "
            f"(init_from.transpose), exclude leaves (init_from.exclude), or initialize missing "
            f"leaves from the seed (init_from.partial=true)."
        )


def _likely_cause(rows: Sequence[tuple[str, ...]]) -> str:
    """Return what to type where only the classes or the size of the images differ."""
    if all(name.startswith("head/") and found != "-" for name, _, found, _ in rows):
        return (
            "Data of other classes have another head. For a new one, which starts by the seed: "
            "init_from.exclude='[head/*]'. Or: "
        )
    if {name.partition("/")[0] for name, *_ in rows} == {"positions"}:
        return (
            "Images of another size have other positions. Have them resized to that of the "
            "source: model.pixels.height and model.pixels.width. Or: "
        )
    return ""


def _stored_names(found: Iterable[str], renames: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the name of each leaf in the source, by its name after `renames`."""
    stored: dict[str, str] = {}
    for old in found:
        name = next((new for pair in renames if (new := _rename(old, *pair))), old)
        if name in stored:
            raise ConfigError(
                f"init_from.rename calls two leaves {name}: {stored[name]} and {old}. Give one "
                f"of them another name, or put a pair for it before the others."
            )
        stored[name] = old
    return stored


def _rename(name: str, pattern: str, replacement: str) -> str:
    """Rename a leaf if its name matches `pattern`; else return an empty text."""
    stars = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name)
    if stars is None:
        return ""
    first, *rest = replacement.split("*")
    return first + "".join(s + text for s, text in zip(stars.groups(), rest, strict=True))


def _check_patterns(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for i, pattern in enumerate(patterns):
        hit = any(_rename(n, pattern, pattern) if key == "rename" else matches(n, pattern)
                  for n in names)  # fmt: skip
        if not hit:
            near = nearest(pattern, names) or ["*"]
            side = "of the source" if key == "rename" else "of this model"
            raise ConfigError(
                f"init_from.{key}[{i}] is {pattern!r}, which matches none of the {len(names)} "
                f"leaves {side}. Nearest: {', '.join(near)}. Write one ({near[0]!r}) or a pattern "
                f"for several."
            )


def _named(params: Params, extra: Extra) -> dict[str, Leaf]:
    extras = {f"extra/{name}": leaf for name, leaf in pytree.named_leaves(extra).items()}
    return {**pytree.named_leaves(params), **extras}


def _stacked(names: Iterable[str]) -> bool:
    """Return whether the blocks of a model are one array each: blocks/qkv, not blocks/0/qkv."""
    return any(n.startswith("blocks/") and not n.split("/")[1].isdigit() for n in names)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _same_kind(one: Any, other: Any) -> bool:
    """Return whether one dtype may be cast to the other: floats to floats."""
    return one == other or all(jnp.issubdtype(t, jnp.floating) for t in (one, other))


def _describe_leaf(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _rows(kind: str, lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"  {kind:10}  {line}" for line in [*lines[:SHOWN], *more]]
