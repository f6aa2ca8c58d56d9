"""The runs of a sweep: each with its values checked before the first one starts."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.config.resolve import ResolvedConfig, resolve
from jtrain.errors import ConfigError
from jtrain.io.atomic_write import atomic_write
from jtrain.io.redact import redact_values
from jtrain.sweep.grid import Grid, label
from jtrain.train.longer_run import keep_lengths, lengths, stored_lengths
from jtrain.train.run_dir import RunDir


@dataclasses.dataclass(frozen=True)
class SweepMember:
    """A run of a sweep."""

    name: str
    """SWEEP/LABEL: it lies in runs/SWEEP/LABEL."""
    point: Mapping[str, str]
    """Its values by key, of the keys that are swept."""
    settings: Sequence[str]
    """All that is typed after the config for it, its name among it."""
    home: Path = Path("runs")
    """Where runs lie."""

    @property
    def label(self) -> str:
        """What tells it from the others."""
        return self.name.partition("/")[2]

    @property
    def directory(self) -> RunDir:
        """Where it lies."""
        return RunDir(self.home / self.name)

    def status(self) -> str:
        """What run.json says; `running` also where it was killed, and empty where none is."""
        return self.directory.stands().get("status", "")

    def is_done(self, config: Path) -> bool:
        """Return whether it is finished, as long as the config now asks for."""
        if self.status() != "done":
            return False
        asked = resolve(config, self.settings).config
        stored = self.directory.stored(type(asked))
        asked = keep_lengths(asked, stored)
        return lengths(asked) == stored_lengths(asked, stored)


def name_of(config: Path, settings: Sequence[str]) -> tuple[str, list[str]]:
    """The name of a sweep, and the settings without it.

    `name=NAME` where it was typed, and the config's file name with `-sweep` where not.

    Raises:
        ConfigError: if runs/NAME is a run and no sweep.
    """
    said = [setting.partition("=")[2] for setting in settings if setting.startswith("name=")]
    name = said[-1] if said else f"{config.stem}-sweep"
    if "/" in name or not name:
        raise ConfigError(f"name={name}: a sweep lies in runs/NAME; write a name without `/`")
    if (Path("runs") / name / "run.json").exists():
        raise ConfigError(
            f"runs/{name} holds a run, and a sweep would lie in it. Write name={name}-sweep"
        )
    return name, [setting for setting in settings if not setting.startswith("name=")]


def members(name: str, grid: Grid) -> list[SweepMember]:
    """The runs of a grid, in its order."""
    keys = list(grid.axes)
    labels: dict[str, int] = {}
    found = []
    for point in grid.points():
        words = label(point, keys)[:150] or "all"
        labels[words] = labels.get(words, 0) + 1
        words += f"-{labels[words]}" if labels[words] > 1 else ""
        found.append(member(name, words, point, grid.fixed))
    return found


def member(name: str, label: str, point: Mapping[str, str], fixed: Sequence[str]) -> SweepMember:
    """A run of a sweep."""
    chosen = [f"{key}={value}" for key, value in point.items()]
    return SweepMember(f"{name}/{label}", point, (*fixed, *chosen, f"name={name}/{label}"))


def check(config: Path, all_members: Sequence[SweepMember]) -> ResolvedConfig:
    """The values of the first member, when those of all are what they should be.

    Raises:
        ConfigError: with each mistake in any of them once, or the values in which a member differs
            from the run that lies in its directory.
    """
    wrong: dict[str, None] = {}
    first = None
    for one in all_members:
        try:
            resolved = resolve(config, one.settings)
            asked, there = resolved.config, one.directory
            asked = keep_lengths(asked, there.stored(type(asked)))
            advice = "Give the sweep another name (name=...), or type the old values."
            there.refuse_another(asked, advice, also=lengths(asked))
            first = first or resolved
        except ConfigError as error:
            wrong |= dict.fromkeys(str(error).splitlines())
    if wrong:
        raise ConfigError("\n".join(wrong))
    assert first is not None, "a sweep has members"
    return first


def keep_record(name: str, config: Path, all_members: Sequence[SweepMember], **facts: Any) -> None:
    """Writes runs/NAME/sweep.json: what was asked, for people and programs that come later."""
    place = Path("runs") / name
    place.mkdir(parents=True, exist_ok=True)
    told = [
        {"name": m.name, "point": dict(m.point), "settings": [*m.settings]} for m in all_members
    ]
    said = redact_values({"config": str(config), **facts, "members": told})
    atomic_write(place / "sweep.json", json.dumps(said, indent=2).encode() + b"\n")


def read_record(sweep: Path) -> list[SweepMember]:
    """Return the members of the sweep in a directory, in its order; none if it holds no sweep."""
    try:
        told = json.loads((sweep / "sweep.json").read_text("utf-8", "replace"))["members"]
        home = sweep.resolve().parent
        return [
            SweepMember(
                f"{sweep.resolve().name}/{m['name'].partition('/')[2]}", m["point"], (), home
            )
            for m in told
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
