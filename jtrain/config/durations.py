"""Durations in steps, epochs, rows, tokens, a share of the run, or time.

In a config `steps: 3 epochs` is a `Duration`, a text. `convert_durations` makes it a number of
steps once the rows of an epoch, the tokens of a row and the time of a step are known. An experiment
sees only the numbers.
"""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from pydantic_core import core_schema

from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean

T = TypeVar("T")
SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
ANY = ("steps", "epochs", "rows", "tokens", *SECONDS)
EXAMPLES = {
    "evaluations": "5 evaluations",
    "steps": "500 steps",
    "epochs": "3 epochs",
    "rows": "500k rows",
    "tokens": "2M tokens",
    "%": "10%",
    "minutes": "10 minutes",
}
LONGEST = 40  # characters of a duration
PIECE = re.compile(r"pieces\.[1-9]")  # of joined schedules, but the first
FROM_START = ("steps", "stages", "optimizer")  # keys of lengths that begin with the run
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMB]?)\s*(%|[A-Za-z]+)")


class Duration(str):
    """Amount and unit of a length, as it was written: `2M tokens`."""

    @property
    def unit(self) -> str:
        """Unit: one of steps, epochs, rows, tokens, %, seconds, minutes, hours, days."""
        word = self._parts[2]
        return word if word.endswith("s") or word == "%" else f"{word}s"

    @property
    def amount(self) -> Fraction:
        """Amount exactly as written."""
        return Fraction(self._parts[0]) * _FACTORS[self._parts[1]]

    @property
    def seconds(self) -> float:
        """Seconds of a duration in time; 0 for other units."""
        return float(self.amount) * SECONDS.get(self.unit, 0)

    @property
    def _parts(self) -> tuple[str, ...]:
        found = _FORM.fullmatch(self.strip())
        return found.groups("") if found else ("0", "", "")


class DurationField:
    """Mark of an int that may be written as a duration: `Annotated[int, DurationField(1)]`."""

    def __init__(self, least: int, *units: str, plain: str = "steps"):
        """Set the smallest amount, and the units beside steps, epochs, rows, tokens and time.

        `plain` is the unit of a number without one.
        """
        self.units, self.plain = tuple(dict.fromkeys((plain, *ANY, *units))), plain
        self.gt, self.ge = (0, None) if least == 1 else (None, least)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        del source, handler
        number = core_schema.int_schema(gt=self.gt, ge=self.ge)
        return core_schema.no_info_wrap_validator_function(self._read, number)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        del core
        number = handler(core_schema.int_schema(gt=self.gt, ge=self.ge))
        text = {"type": "string", "pattern": r"^[0-9.]+[kMB]? ?(%|[a-z]+)$"}
        return {"anyOf": [number, text]}

    def _read(self, value: Any, number: Any) -> Any:
        if not isinstance(value, str) or not re.match(r"\s*[0-9].*[A-Za-z%]\s*$", value):
            return number(value)
        length = Duration(value)
        if len(value) > LONGEST:
            raise ValueError(f"must be at most {LONGEST} characters long, found {len(value)}")
        if length.unit in self.units and length.amount > 0:
            return number(int(length.amount)) if length.unit == self.plain else length
        examples = {**EXAMPLES, self.plain: EXAMPLES[self.plain].split()[0]}
        offered = " or ".join(examples[unit] for unit in self.units if unit in examples)
        raise ValueError(f"must be {offered}, found {value!r}{self._hint(length)}")

    def _hint(self, length: Duration) -> str:
        if length.unit in (*self.units, "%") and length.amount <= 0:
            return "; write more than 0"
        words = re.findall(r"[A-Za-z]+$", str(length))
        return did_you_mean(words[0], self.units) if words else ""


class OwnSteps:
    """Config with a length of its own: `steps`, of which 0 means the run's.

    Shares below it are shares of that length: a warmup of 5 % of a schedule of 1000 steps is 50
    steps, however long the run.
    """

    steps: int


class DurationUnits(NamedTuple):
    """Sizes that convert durations to steps."""

    batch: int  # rows a step
    epoch: int = 0  # rows, 0 where it is not known
    tokens: int = 0  # a row, 0 where it is not known
    steps_per_call: int = 1
    seconds: float = 0.0  # a step, 0 where it is not known
    clock: bool = True  # whether checkpoints may be saved by the clock
    earlier: tuple[tuple[int, "DurationUnits"], ...] = ()
    """Last step of each earlier stage, and its sizes; the others are those of the last stage."""


def find_durations(config: Any, key: str = "") -> dict[str, Duration]:
    """Return each duration of a config that is not yet a number of steps, by its dotted key."""
    if isinstance(config, Duration):
        return {key: config}
    found = {}
    for name, child in _children(config):
        found |= find_durations(child, f"{key}.{name}" if key else name)
    return found


def find_own_steps(config: Any, key: str = "") -> dict[str, Any]:
    """Return each part of a config with a length of its own, by the part's dotted key.

    A part inside such a part belongs to the outer one and is left out.
    """
    if isinstance(config, OwnSteps):
        return {key: config}
    found: dict[str, Any] = {}
    for name, child in _children(config):
        found |= find_own_steps(child, f"{key}.{name}" if key else name)
    return found


def convert_durations(config: T, facts: DurationUnits) -> T:
    """Return the config with steps for each duration; `checkpoint.every` in time stays.

    Parts of a step are rounded up. Durations outside schedules are rounded up to multiples of the
    steps of a call.

    Raises:
        ConfigError: if the size that converts a duration is not known.
    """
    top: Any = config
    total = top.steps
    if isinstance(total, Duration):
        total = _steps("steps", total, facts, 0)
    return _settled(config, "", facts, 0 if isinstance(total, Duration) else total)


def convert_part(part: T, key: str, facts: DurationUnits, steps: int) -> T:
    """Return a part of a config with a number of steps for each duration, as `convert_durations`.

    Args:
        key: the dotted key of the part, for errors.
    """
    return _settled(part, key, facts, steps)


def stays_in_time(key: str, length: Duration, facts: DurationUnits) -> bool:
    """Return whether a duration stays in time, because no computed number depends on it."""
    return length.unit in SECONDS and key == "checkpoint.every" and facts.clock


def _settled(value: Any, key: str, facts: DurationUnits, total: int) -> Any:
    if isinstance(value, Duration):
        return _steps(key, value, facts, total)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new: dict[str, Any] = {}
        if isinstance(value, OwnSteps):
            new["steps"] = _settled(value.steps, f"{key}.steps", facts, total)
            facts, total = facts._replace(steps_per_call=1), new["steps"] or total
        for name, child in _children(value):
            if name not in new:
                new[name] = _settled(child, f"{key}.{name}" if key else name, facts, total)
        changed = {name: x for name, x in new.items() if x is not getattr(value, name)}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, dict) and find_durations(value):
        return {n: _settled(x, f"{key}.{n}", facts, total) for n, x in value.items()}
    if isinstance(value, tuple) and find_durations(value):
        return tuple(_settled(x, f"{key}.{n}", facts, total) for n, x in enumerate(value))
    return value


def _children(value: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [(str(name), child) for name, child in value.items()]
    if isinstance(value, tuple | list):
        return [(str(number), child) for number, child in enumerate(value)]
    return []


def _steps(key: str, length: Duration, facts: DurationUnits, total: int) -> Any:
    if stays_in_time(key, length, facts):
        return length
    if not (size := _per_step(length.unit, facts, total)):
        why = {
            "epochs": "the experiment's data has no end",
            "tokens": "the experiment has no tokens per row: jt.Experiment(tokens=...)",
            "%": "the run has no last step",
        }.get(length.unit, "the time of a step was not measured")
        raise ConfigError(
            f"{key}: {length} cannot be counted, as {why}. Write {key}=500, in steps."
        )
    amount, first = length.amount * SECONDS.get(length.unit, 1), 0
    if facts.earlier and length.unit in ("epochs", "rows", "tokens") and PIECE.search(key):
        raise ConfigError(
            f"{key}: {length} cannot be counted through stages, as its piece does not begin with "
            f"the run. Write it in steps: {key}=500."
        )
    for stop, units in facts.earlier if key.startswith(FROM_START) else ():
        own = _per_step(length.unit, units, total) or size
        if amount <= (stop - first) * own:
            size = own
            break
        amount, first = amount - (stop - first) * own, stop
    steps = first + math.ceil(amount / size)
    return -(-steps // facts.steps_per_call) * facts.steps_per_call


def _per_step(unit: str, facts: DurationUnits, total: int) -> Fraction | int:
    """Return what a step has of a unit; 0 where it is not known."""
    return {
        "steps": 1,
        "epochs": Fraction(facts.batch, facts.epoch) if facts.epoch else 0,
        "rows": facts.batch,
        "tokens": facts.batch * facts.tokens,
        "%": Fraction(100, total) if total else 0,
    }.get(unit, Fraction(facts.seconds))
