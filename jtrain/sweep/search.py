"""Search by Optuna: ranges instead of lists, and trials that learn from earlier ones."""

import contextlib
import dataclasses
import importlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.checkpoint.retention import BestMetric
from jtrain.errors import ConfigError
from jtrain.sweep.grid import split_values
from jtrain.sweep.members import SweepMember, build_member

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(:log)?")
INTEGER = re.compile(r"[-+]?\d+")


@dataclasses.dataclass(frozen=True)
class SearchRange:
    """A search range, both ends included."""

    low: float
    high: float
    log: bool
    integer: bool


Space: TypeAlias = Mapping[str, SearchRange | Sequence[str]]


def parse_space(settings: Sequence[str]) -> tuple[Space, list[str]]:
    """Parse the settings into the search space by key, and the fixed settings.

    `KEY=LOW..HIGH` is uniform (over whole numbers if both ends are whole), `KEY=LOW..HIGH:log` is
    log-uniform, `KEY=A,B,C` is a choice.

    Raises:
        ConfigError: if a key is repeated, a range is empty or, on a log scale, not above 0; or if
            no key is searched.
    """
    found: dict[str, SearchRange | Sequence[str]] = {}
    fixed: list[str] = []
    for setting in settings:
        key, _, text = setting.partition("=")
        if key in found or any(other.partition("=")[0] == key for other in fixed):
            raise ConfigError(f"{key} is given twice; write {key}=LOW..HIGH or {key}=FIRST,SECOND")
        choices = split_values(text)
        if ends := RANGE.fullmatch(text):
            found[key] = _parse_range(setting, *ends.groups())
        elif len(choices) > 1:
            if "" in choices or len(set(choices)) < len(choices):
                raise ConfigError(f"{setting}: a value is missing or repeated; give each once")
            found[key] = choices
        else:
            fixed.append(setting)
    if not found:
        raise ConfigError(
            "no key is searched; write a range, such as optimizer.lr=1e-5..1e-2:log, or a choice, "
            "such as optimizer.kind=adamw,lion"
        )
    return found, fixed


def corners(space: Space) -> Iterator[dict[str, str]]:
    """Yield points that cover each end and each choice, for validation before the first trial."""
    sides = {k: _format_ends(s) if isinstance(s, SearchRange) else s for k, s in space.items()}
    first = {key: values[0] for key, values in sides.items()}
    for key, values in sides.items():
        for value in values:
            yield {**first, key: value}


class Search:
    """Trials of a study, stored in a directory so that another call resumes it.

    Raises:
        ConfigError: if Optuna is not installed, or the stored study has another search space.
    """

    def __init__(self, directory: Path, space: Space, goal: BestMetric, *, seed: int):
        optuna = _optuna()
        journal = importlib.import_module("optuna.storages.journal")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        directory.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(
            journal.JournalFileBackend(str(directory / "optuna.log"))
        )
        self._states = optuna.trial.TrialState
        self._distributions = {key: _distribution(optuna, axis) for key, axis in space.items()}
        self._space = space
        self._study = optuna.create_study(
            study_name=directory.name,
            storage=storage,
            sampler=_sampler(optuna, seed),
            direction="minimize" if goal.end == "lowest" else "maximize",
            load_if_exists=True,
        )
        for trial in self._study.trials:
            if trial.distributions != self._distributions:
                raise ConfigError(
                    f"{directory} holds a search over {', '.join(trial.distributions)} in other "
                    f"ranges. Choose another name: name={directory.name}-2"
                )

    def members(self, trials: int, fixed: Sequence[str]) -> Iterator[SweepMember]:
        """Yield runs until there are `trials`: first the unfinished ones, then new ones."""
        for trial in self._study.trials:
            if trial.state == self._states.RUNNING:
                yield self._member(trial.number, trial.params, fixed)
        while len(self._study.trials) < trials:
            trial = self._study.ask(self._distributions)
            yield self._member(trial.number, trial.params, fixed)

    def all(self, fixed: Sequence[str]) -> list[SweepMember]:
        """Return the run of every trial so far."""
        return [self._member(t.number, t.params, fixed) for t in self._study.trials]

    def tell(self, member: SweepMember, value: float | None) -> None:
        """Record the result of a trial; None: it failed."""
        number = int(member.label.removeprefix("trial-"))
        if self._study.trials[number].state == self._states.RUNNING:
            failed = self._states.FAIL if value is None else None
            with contextlib.suppress(ValueError):
                self._study.tell(number, value, state=failed)

    def _member(self, number: int, params: Mapping[str, Any], fixed: Sequence[str]) -> SweepMember:
        point = {key: _format(params[key]) for key in self._space}
        return build_member(self._study.study_name, f"trial-{number:04}", point, fixed)


def _parse_range(setting: str, low: str, high: str, log: str | None) -> SearchRange:
    found = SearchRange(
        low=float(low),
        high=float(high),
        log=bool(log),
        integer=bool(INTEGER.fullmatch(low) and INTEGER.fullmatch(high)),
    )
    if found.low >= found.high:
        raise ConfigError(f"{setting}: {low}..{high} is empty; write {high}..{low}")
    if found.log and found.low <= 0:
        raise ConfigError(
            f"{setting}: a log scale needs a range above 0; drop :log, or raise {low}"
        )
    return found


def _format_ends(range_: SearchRange) -> list[str]:
    kind = int if range_.integer else float
    return [_format(kind(range_.low)), _format(kind(range_.high))]


def _format(value: Any) -> str:
    """Return a value as it is typed, with all digits: a resumed trial has the same value."""
    return value if isinstance(value, str) else repr(value)


def _distribution(optuna: Any, axis: SearchRange | Sequence[str]) -> Any:
    kinds = optuna.distributions
    if not isinstance(axis, SearchRange):
        return kinds.CategoricalDistribution(tuple(axis))
    if axis.integer:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)


def _sampler(optuna: Any, seed: int) -> Any:
    with warnings.catch_warnings():  # Optuna calls the sampling of concurrent trials experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(
            "--search optuna needs the package optuna, which is not installed: "
            "pip install 'jtrain[optuna]'"
        ) from None
