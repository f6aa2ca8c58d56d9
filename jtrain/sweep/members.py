"""Members of a sweep: the runs of a grid, all validated before the first one starts."""

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.config.resolve import ResolvedConfig, resolve
from jtrain.config.top import RUNS
from jtrain.errors import ConfigError
from jtrain.io.redact import redact_values
from jtrain.io.regular_files import atomic_write, read_json
from jtrain.train.resume import match_config
from jtrain.train.run_dir import RunDir

MOST_BYTES = 1 << 26  # of a sweep.json
ANOTHER_SWEEP = "Give the sweep another name (name=...), or type the old values."
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
BETWEEN = re.compile(r"[-+.\deE]*\d\.\.[-+.\deE]*\d(:log)?")
OPEN, CLOSED = "[{(", "]})"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Values by key, in the order they were typed; the last key changes fastest."""

    axes: Mapping[str, Sequence[str]]
    """The values of each key with several values, as they are typed."""
    fixed: Sequence[str]
    """Settings that every member has."""

    def points(self) -> Iterator[dict[str, str]]:
        """Yield the values of each member by key."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))


def parse_grid(settings: Sequence[str]) -> Grid:
    """Parse the settings into a grid.

    A setting is `KEY=PART,PART,...`. Commas inside brackets, braces and quotes do not split. A part
    is a range of whole numbers, `A..B` or `A..B..STEP` with both ends included, or a value as
    `jtrain run` takes it.

    Raises:
        ConfigError: if a key is repeated, a part is empty or repeated, or a range is empty.
    """
    axes, fixed = {}, []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            fixed.append(setting)  # the config reports its error
            continue
        if key in axes or any(other.partition("=")[0] == key for other in fixed):
            raise ConfigError(f"{key} is given twice; write {key}=FIRST,SECOND")
        values = _values(setting, split_values(text))
        if len(values) == 1:
            fixed.append(f"{key}={values[0]}")
        else:
            axes[key] = values
    return Grid(axes, fixed)


def split_values(text: str) -> list[str]:
    """Split `text` at its commas outside of brackets, braces and quotes."""
    pieces, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in OPEN:
            depth += 1
        elif character in CLOSED:
            depth -= 1
        elif character == "," and depth == 0:
            pieces.append(text[start:index])
            start = index + 1
    return [part.strip() for part in [*pieces, text[start:]]]


def _values(setting: str, written: Sequence[str]) -> list[str]:
    values = [value for part in written for value in _range(setting, part)]
    if "" in values and len(values) > 1:
        raise ConfigError(f"{setting}: a value is missing next to a comma; remove the comma")
    repeated = [value for value, times in collections.Counter(values).items() if times > 1]
    if repeated:
        raise ConfigError(f"{setting}: {repeated[0]} is given twice; give each value once")
    return values


def _range(setting: str, part: str) -> list[str]:
    """Return the numbers of `0..2`; any other part is unchanged."""
    found = RANGE.fullmatch(part)
    if found is None:
        if BETWEEN.fullmatch(part):
            raise ConfigError(
                f"{setting}: {part} is not a range of whole numbers, such as 0..2 or 0..50..10. "
                f"Write the values with commas, or search the range by Optuna "
                f"(docs/experiments.md)."
            )
        return [part]
    first, last, step = (int(x) if x else 1 for x in found.groups())
    if not step:
        raise ConfigError(f"{setting}: {part} goes on by 0; write {first}..{last}")
    numbers = range(first, last + 1, step)
    if not numbers:
        raise ConfigError(f"{setting}: {part} is empty; write {last}..{first}")
    return [str(number) for number in numbers]


def label(point: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return a name for a directory, `lr=1e-4,seed=0`, with keys shortened where unambiguous."""
    ends = [key.rpartition(".")[2] for key in keys]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}

    def plain(text: str) -> str:
        sign = "-" if text.startswith("-") else ""
        return sign + (re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none")

    return ",".join(f"{plain(short[key])}={plain(point[key])}" for key in keys)


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

    def is_done(self, config: Path) -> bool:
        """Return whether the run is done at the length that the config now requests."""
        if self.directory.facts().get("status") != "done":
            return False
        asked = resolve(config, self.settings).config
        return match_config(self.directory, asked, ANOTHER_SWEEP).is_as_long


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
        chosen = [f"{key}={value}" for key, value in point.items()]
        full = f"{name}/{words}"
        result.append(SweepMember(full, point, (*grid.fixed, *chosen, f"name={full}")))
    return result


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
            match_config(each.directory, resolved.config, ANOTHER_SWEEP)
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


def read_record(sweep: Path) -> list[SweepMember]:
    """Return the members of the sweep in a directory, in its order; none if it holds no sweep."""
    try:
        records = read_json(sweep / "sweep.json", most=MOST_BYTES, inside=sweep)["members"]
        home = sweep.resolve().parent
        return [
            SweepMember(
                f"{sweep.resolve().name}/{m['name'].partition('/')[2]}", m["point"], (), home
            )
            for m in records
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
