"""A search by Optuna: ranges in the place of lists, and trials that learn from those before."""

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
from jtrain.sweep.grid import parts
from jtrain.sweep.members import SweepMember, member

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(:log)?")
WHOLE = re.compile(r"[-+]?\d+")


@dataclasses.dataclass(frozen=True)
class SearchRange:
    """A range that is searched, both ends among it."""

    low: float
    high: float
    log: bool
    whole: bool


Space: TypeAlias = Mapping[str, SearchRange | Sequence[str]]


def space(settings: Sequence[str]) -> tuple[Space, list[str]]:
    """What is searched by key, and the settings that every trial has.

    `KEY=LOW..HIGH` is searched evenly (over whole numbers where both ends are whole),
    `KEY=LOW..HIGH:log` by its logarithm, `KEY=A,B,C` is a choice.

    Raises:
        ConfigError: for a key that is said twice, a range that is empty or, on a log scale, not
            above 0; or if nothing is searched.
    """
    found: dict[str, SearchRange | Sequence[str]] = {}
    fixed: list[str] = []
    for setting in settings:
        key, _, text = setting.partition("=")
        if key in found or any(other.partition("=")[0] == key for other in fixed):
            raise ConfigError(f"{key} is said twice; write {key}=LOW..HIGH or {key}=FIRST,SECOND")
        written = parts(text)
        if ends := RANGE.fullmatch(text):
            found[key] = _between(setting, *ends.groups())
        elif len(written) > 1:
            if "" in written or len(set(written)) < len(written):
                raise ConfigError(f"{setting}: a value is missing or said twice; say each once")
            found[key] = written
        else:
            fixed.append(setting)
    if not found:
        raise ConfigError(
            "nothing is searched; write a range, such as optimizer.lr=1e-5..1e-2:log, or a choice, "
            "such as optimizer.kind=adamw,lion"
        )
    return found, fixed


def corners(space: Space) -> Iterator[dict[str, str]]:
    """Points that say each end and each choice, to be checked before a trial begins."""
    sides = {k: _spelled_ends(s) if isinstance(s, SearchRange) else s for k, s in space.items()}
    first = {key: values[0] for key, values in sides.items()}
    for key, values in sides.items():
        for value in values:
            yield {**first, key: value}


class Search:
    """The trials of a study, kept in a directory so that another call goes on with it.

    Raises:
        ConfigError: if Optuna is not installed, or the study there searches something else.
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
        self._distributions = {key: _distribution(optuna, what) for key, what in space.items()}
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
                    f"ranges. Give this one a name of its own: name={directory.name}-2"
                )

    def members(self, trials: int, fixed: Sequence[str]) -> Iterator[SweepMember]:
        """Runs until there are `trials` of them: first those that did not end, then new ones."""
        for trial in self._study.trials:
            if trial.state == self._states.RUNNING:
                yield self._member(trial.number, trial.params, fixed)
        while len(self._study.trials) < trials:
            asked = self._study.ask(self._distributions)
            yield self._member(asked.number, asked.params, fixed)

    def all(self, fixed: Sequence[str]) -> list[SweepMember]:
        """Every trial so far as the run that it is."""
        return [self._member(t.number, t.params, fixed) for t in self._study.trials]

    def tell(self, member: SweepMember, value: float | None) -> None:
        """Notes what a trial came to; None: it failed."""
        number = int(member.label.removeprefix("trial-"))
        if self._study.trials[number].state == self._states.RUNNING:
            failed = self._states.FAIL if value is None else None
            with contextlib.suppress(ValueError):
                self._study.tell(number, value, state=failed)

    def _member(self, number: int, params: Mapping[str, Any], fixed: Sequence[str]) -> SweepMember:
        point = {key: _spelled(params[key]) for key in self._space}
        return member(self._study.study_name, f"trial-{number:04}", point, fixed)


def _between(setting: str, low: str, high: str, log: str | None) -> SearchRange:
    found = SearchRange(
        low=float(low),
        high=float(high),
        log=bool(log),
        whole=bool(WHOLE.fullmatch(low) and WHOLE.fullmatch(high)),
    )
    if found.low >= found.high:
        raise ConfigError(f"{setting}: {low}..{high} is no range; write {high}..{low}")
    if found.log and found.low <= 0:
        raise ConfigError(f"{setting}: a log scale begins above 0; take :log off, or raise {low}")
    return found


def _spelled_ends(between: SearchRange) -> list[str]:
    kind = int if between.whole else float
    return [_spelled(kind(between.low)), _spelled(kind(between.high))]


def _spelled(value: Any) -> str:
    """A value as one types it; all digits, so that a trial that goes on has the same."""
    return value if isinstance(value, str) else repr(value)


def _distribution(optuna: Any, what: SearchRange | Sequence[str]) -> Any:
    kinds = optuna.distributions
    if not isinstance(what, SearchRange):
        return kinds.CategoricalDistribution(tuple(what))
    if what.whole:
        return kinds.IntDistribution(int(what.low), int(what.high), log=what.log)
    return kinds.FloatDistribution(what.low, what.high, log=what.log)


def _sampler(optuna: Any, seed: int) -> Any:
    with warnings.catch_warnings():  # that of trials beside one another is called experimental
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
