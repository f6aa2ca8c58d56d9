"""Grid of a sweep: `optimizer.lr=1e-4,3e-4 seed=0..2` as the settings of each member."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from jtrain.errors import ConfigError

MOST = 10_000  # members
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

    def __len__(self) -> int:
        return math.prod(map(len, self.axes.values()))

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
        ConfigError: if a key is repeated, a part is empty or repeated, a range is empty, or there
            are more than 10,000 members.
    """
    axes, fixed = {}, []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            fixed.append(setting)  # the config reports its error
            continue
        if key in axes or any(other.partition("=")[0] == key for other in fixed):
            raise ConfigError(f"{key} is given twice; write {key}=FIRST,SECOND")
        values = _values(setting, key, split_values(text))
        if len(values) == 1:
            fixed.append(f"{key}={values[0]}")
        else:
            axes[key] = values
    found = Grid(axes, fixed)
    if len(found) > MOST:
        counts = " x ".join(str(len(values)) for values in axes.values())
        raise ConfigError(
            f"{counts} = {len(found):,} runs are more than {MOST:,}: take fewer values"
        )
    return found


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


def _values(setting: str, key: str, written: Sequence[str]) -> list[str]:
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
                f"Write the values with commas, or use --search optuna for a continuous range."
            )
        return [part]
    first, last, step = (int(x) if x else 1 for x in found.groups())
    if not step:
        raise ConfigError(f"{setting}: {part} goes on by 0; write {first}..{last}")
    numbers = range(first, last + 1, step)
    if not numbers:
        raise ConfigError(f"{setting}: {part} is empty; write {last}..{first}")
    return [str(number) for number in numbers[: MOST + 1]]


def label(point: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return a name for a directory, `lr=1e-4,seed=0`, with keys shortened where unambiguous."""
    ends = [key.rpartition(".")[2] for key in keys]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}

    def plain(text: str) -> str:
        return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"

    def signed(text: str) -> str:
        return f"-{plain(text)}" if text.startswith("-") else plain(text)

    return ",".join(f"{plain(short[key])}={signed(point[key])}" for key in keys)
