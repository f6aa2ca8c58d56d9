"""Members of a sweep: its runs, all validated before the first one starts."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.config.resolve import ResolvedConfig, resolve
from jtrain.config.top import RUNS
from jtrain.errors import ConfigError
from jtrain.io.redact import redact_values
from jtrain.io.regular_files import atomic_write, read_json
from jtrain.sweep.grid import Grid, label
from jtrain.train.run_dir import RunDir

ANOTHER_SWEEP = "Give the sweep another name (name=...), or type the old values."


@dataclasses.dataclass(frozen=True)
class SweepMember:
    """A run of a sweep."""

    name: str
    """SWEEP/LABEL: the run's directory is runs/SWEEP/LABEL."""
    point: Mapping[str, str]
    """Its values by key, for the swept keys."""
    settings: Sequence[str]
    """All settings that follow the config, including its name."""
    home: Path = RUNS
    """The directory of the runs."""

    @property
    def label(self) -> str:
        """The part of the name that distinguishes it from the other members."""
        return self.name.partition("/")[2]

    @property
    def directory(self) -> RunDir:
        """The run's directory."""
        return RunDir(self.home / self.name)

    def status(self) -> str:
        """Return the status in run.json; `running` also after a kill, empty without run.json."""
        return self.directory.facts().get("status", "")

    def is_done(self, config: Path) -> bool:
        """Return whether the run is done at the length that the config now requests."""
        if self.status() != "done":
            return False
        asked = resolve(config, self.settings).config
        return self.directory.match(asked, ANOTHER_SWEEP).is_as_long


def split_name(config: Path, settings: Sequence[str]) -> tuple[str, list[str]]:
    """Split the settings into the name of the sweep and the other settings.

    Without `name=NAME` the name is the config's file name with `-sweep`.

    Raises:
        ConfigError: if runs/NAME is a run and not a sweep.
    """
    names = [setting.partition("=")[2] for setting in settings if setting.startswith("name=")]
    name = names[-1] if names else f"{config.stem}-sweep"
    if "/" in name or not name:
        raise ConfigError(f"name={name}: a sweep is stored in runs/NAME; write a name without `/`")
    if (RUNS / name / "run.json").exists():
        raise ConfigError(
            f"runs/{name} is a run, so it cannot hold a sweep. Write name={name}-sweep"
        )
    return name, [setting for setting in settings if not setting.startswith("name=")]


def build_members(name: str, grid: Grid) -> list[SweepMember]:
    """Return the runs of a grid, in its order."""
    keys = list(grid.axes)
    labels: set[str] = set()
    result = []
    for point in grid.points():
        first = label(point, keys)[:150] or "all"
        numbered = (f"{first}-{number}" for number in itertools.count(2))
        words = next(each for each in itertools.chain([first], numbered) if each not in labels)
        labels.add(words)
        result.append(build_member(name, words, point, grid.fixed))
    return result


def build_member(
    name: str, label: str, point: Mapping[str, str], fixed: Sequence[str]
) -> SweepMember:
    """Return a run of a sweep."""
    chosen = [f"{key}={value}" for key, value in point.items()]
    return SweepMember(f"{name}/{label}", point, (*fixed, *chosen, f"name={name}/{label}"))


def check_members(config: Path, all_members: Sequence[SweepMember]) -> ResolvedConfig:
    """Validate all members, and return the values of the first.

    Raises:
        ConfigError: with each distinct error, or the values in which a member differs from the run
            that exists in its directory.
    """
    errors: dict[str, None] = {}
    first = None
    for each in all_members:
        try:
            resolved = resolve(config, each.settings)
            each.directory.match(resolved.config, ANOTHER_SWEEP)
            first = first or resolved
        except ConfigError as error:
            errors |= dict.fromkeys(str(error).splitlines())
    if errors:
        raise ConfigError("\n".join(errors))
    assert first is not None, "a sweep has members"
    return first


def save_record(name: str, config: Path, all_members: Sequence[SweepMember], **facts: Any) -> None:
    """Write runs/NAME/sweep.json, the record of the settings."""
    directory = RUNS / name
    directory.mkdir(parents=True, exist_ok=True)
    records = [
        {"name": m.name, "point": dict(m.point), "settings": [*m.settings]} for m in all_members
    ]
    content = redact_values({"config": str(config), **facts, "members": records})
    atomic_write(directory / "sweep.json", json.dumps(content, indent=2).encode() + b"\n")


MOST = 1 << 26  # bytes of a sweep.json


def read_record(sweep: Path) -> list[SweepMember]:
    """Return the members of the sweep in a directory, in its order; none if it holds no sweep."""
    try:
        records = read_json(sweep / "sweep.json", most=MOST, inside=sweep)["members"]
        home = sweep.resolve().parent
        return [
            SweepMember(
                f"{sweep.resolve().name}/{m['name'].partition('/')[2]}", m["point"], (), home
            )
            for m in records
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
