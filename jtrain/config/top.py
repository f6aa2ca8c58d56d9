"""The keys that every config has."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from jtrain.config.configclass import StoreAddress, configclass
from jtrain.config.durations import Duration, DurationField
from jtrain.config.sections import Guard, InitFrom, SkipPolicy, XlaConfig, flag_problems
from jtrain.io import environment
from jtrain.io.object_store import is_address

EXPERIMENT = re.compile(r"[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def _plain_name(name: str) -> str:
    if EXPERIMENT.fullmatch(name):
        return name
    plain = re.sub(r"\W", "_", name.rpartition("/")[2].removesuffix(".py"), flags=re.ASCII)
    plain = f"study_{plain}" if plain[:1].isdigit() else plain
    raise ValueError(
        f"must be a plain name, the NAME of experiments/NAME.py and never a path, found {name!r}; "
        f"write {plain or 'my_study'}, as the file is then called"
    )


_PART = re.compile(r"(?![.~-])[^/\\:*?\"<>|;$&`\x00-\x1f\x7f]*")


def _parts(name: str) -> list[str]:
    """Split `SWEEP/MEMBER` in two; `runs/NAME` is a path and no name."""
    sweep, slash, member = name.partition("/")
    return [sweep, member] if slash and sweep and member and sweep != "runs" else [name]


def is_run_name(name: str) -> bool:
    """Return whether a run may have this name: plain parts, joined by `/`."""
    return len(name) <= 200 and all(map(_PART.fullmatch, _parts(name)))


def _directory_name(name: str) -> str:
    if is_run_name(name):
        return name
    plain = re.sub(r"[^\w.+-]+", "-", name[:200]).strip("-.")
    raise ValueError(
        f"must be the name of a directory in runs/, no path, found {name!r}; write {plain or 'try'}"
    )


PlainName = Annotated[str, AfterValidator(_plain_name)]
DirectoryName = Annotated[str, AfterValidator(_directory_name)]
# Steps, or a Duration until the data and the time of a step are known.
Cadence = Annotated[int, DurationField(0, "%")]


RUNS = Path(environment.RUNS)
"""The directory of all runs; a run is in RUNS / name."""


@configclass
class EvaluationSet:
    """Evaluation of the experiment on one of its sets."""

    every: Cadence = 0
    """Steps between evaluations, or 1 epoch, 2M tokens, 10%, 5 minutes; 0: only at the end."""


@configclass
class EvaluateConfig:
    """Evaluation of the experiment during training."""

    every: Cadence = 0
    """Steps between evaluations, or 1 epoch, 2M tokens, 10%, 5 minutes; 0: only at the end."""
    batch: int = Field(default=0, ge=0)
    """Rows a batch, over all devices; 0: as many as in training."""
    rows_interact: Literal["batch", "slice"] = "batch"
    """For a loss whose rows interact in evaluation too. batch: all rows of a set are one batch, or
    the run is refused; slice: the rows of each batch are a group."""
    sets: dict[str, EvaluationSet] = Field(default_factory=dict)
    """Sets of the experiment, by name, with their own cadence."""
    patience: Annotated[int, DurationField(0, "%", plain="evaluations")] = 0
    """Evaluations in a row without an improvement of checkpoint.best after which the run is done;
    or a duration: 2 epochs, 10%, 10 minutes; 0: never."""


@configclass
class CheckpointConfig:
    """Checkpoints: when the state is saved, and how many are retained."""

    every: Annotated[int, DurationField(0, "%")] = 500
    """Steps between checkpoints, or 1 epoch, 10%, 10 minutes; 0: only at the end and at a stop."""
    grace: float = Field(default=25.0, gt=0)
    """Seconds within which a run ends after SIGTERM, SIGUSR1 or Ctrl-C."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to retain."""
    keep_every: int = Field(default=0, ge=0)
    """Steps in each of which the first checkpoint is retained for good: of 10000 those of step
    10000, 20000 and so on, or the next that was saved; 0: none."""
    best: str = ""
    """Metric whose best checkpoint is retained too: loss, accuracy, or NAME/loss of one of several
    sets. The lowest is best, of accuracy, correct, finished, auc, f1, r2 and top_5 the highest; of
    another metric write `highest NAME`. Empty: none."""
    store: StoreAddress = ""
    """Address to which each sealed checkpoint is copied, with the run's files: s3://bucket/runs; a
    run without a directory is restored from STORE/NAME. Empty: no copies."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """Policy for a damaged newest checkpoint: resume from the newest valid one, or end."""


@configclass
class LogConfig:
    """Log of a run while it trains."""

    every: Annotated[int, DurationField(1, "%")] = 50
    """Steps between log lines, or 1M tokens, 1%, 10 seconds."""
    pictures: Cadence = 0
    """Steps between pictures, if the experiment has them; 0: only at the end."""


@configclass
class ChecksConfig:
    """Checks before the first step, and of steps computed twice."""

    first_batch: bool = True
    """Check the first batch, also of each evaluation set, for labels and tokens out of range, and
    the loss for (b, 1) broadcast against (b,) and for hidden rows that count."""
    recompute: int = Field(default=0, ge=0)
    """Steps between steps that are computed twice and compared bit for bit; 0: none. 200 costs half
    a percent of the time, and during such a step the memory of a second state."""


@configclass
class Stage:
    """First steps of a run, with other values than the rest."""

    until: Annotated[int, DurationField(1)]
    """Last step of the stage, or 2 epochs, 500k rows, 300M tokens from the beginning of the run."""
    set: dict[str, Any] = Field(min_length=1)
    """Its values by dotted key: {batch: 64, data.context: 256}. Any of the experiment's own keys
    that leaves the parameters their shapes, batch and microbatches; without microbatches as many
    as keep them no larger than the run's."""
    lr: Annotated[float, Field(gt=0)] | Literal["linear", "sqrt"] = 1.0
    """Factor of the learning rate. linear: the tokens (else rows) of its batch over those of the
    run's; sqrt: the root of that."""


@configclass
class BaseConfig:
    """Fields of every run, whatever it trains."""

    implied_by: ClassVar[Sequence[str]] = ()
    """Dotted keys, the dials, that imply others unless the first of them is 0: `model.depth`."""
    experiment: PlainName
    """What is trained: NAME of experiments/NAME.py in a directory above the config, or of an
    installed package's entry point in the group jtrain.experiments; or package.module:Config."""
    name: DirectoryName = ""
    """The run's directory, runs/NAME; empty: the config's file name without .yaml."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random: the parameters, the order of the rows, dropout."""
    steps: Annotated[int, DurationField(1)]
    """Updates of the optimizer, or 3 epochs, 500k rows, 2M tokens, 10 minutes."""
    batch: int = Field(gt=0)
    """Rows a step, over all devices and microbatches."""
    microbatches: int = Field(default=1, gt=0)
    """Slices of a batch whose gradients are summed: less memory, the same update."""
    stages: tuple[Stage, ...] = ()
    """First stages, in order, with other values: a smaller batch, a shorter context. Behind the
    last of them the config's own values hold, and evaluation always has those."""
    steps_per_call: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Steps in one call of the compiled function; above 1, small models train faster. auto: by the
    FLOPs and bytes of a step, several where it is small, fewer before each step that a cadence
    names; a number must divide every cadence."""
    init_from: InitFrom = InitFrom()
    """Trained parameters to start from."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation during training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving of the state."""
    log: LogConfig = LogConfig()
    """Log during training."""
    checks: ChecksConfig = ChecksConfig()
    """Checks before the first step, and recomputed steps."""
    guard: Guard = SkipPolicy()
    """Policy for a step that is not finite, or a spike."""
    xla: XlaConfig = XlaConfig()
    """Flags of the compiler."""

    @property
    def run_name(self) -> str:
        """Name of the run: that of the experiment, where it has none."""
        return self.name or self.experiment.partition(":")[0]

    @property
    def steps_divisor(self) -> int:
        """Number of steps that divides every cadence: 1 where calls may be shorter."""
        return 1 if self.steps_per_call == "auto" else self.steps_per_call

    def implied(self, given: Callable[[str], Any]) -> Mapping[str, Any]:
        """Return by dotted key what the dials imply, which a config file may leave out.

        Args:
            given: whether a dotted key was given beside the dials; the others are not known yet.
        """
        del given
        return {}

    def cadences(self) -> dict[str, int | Duration]:
        """Return by its key every cadence at which the state is needed, 0 for none, and `steps`."""
        sets = {f"evaluate.sets.{name}.every": x.every for name, x in self.evaluate.sets.items()}
        return {
            "steps": self.steps,
            "evaluate.every": self.evaluate.every,
            **sets,
            "checkpoint.every": self.checkpoint.every,
            "log.pictures": self.log.pictures,
            "checks.recompute": self.checks.recompute,
        }

    def rename_keys(self, message: str) -> str:
        """Return a message with the names by which the caller gave the values: those of keys."""
        return message

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the keys whose values are each allowed but conflict, with the conflict.

        An experiment adds its own: `yield from super().problems()`, then `yield key, words`.
        """
        counted = {
            "steps": self.steps,
            "batch": self.batch,
            "evaluate.batch": self.evaluate.batch,
            "guard.without": max((stop for _, stop in self.guard.without), default=0),
        }
        for key, count in counted.items():  # steps and rows are counted in int32
            if isinstance(count, Duration) or count < 2**31:
                continue
            shown = count if count < 2**63 else "a number of more than 18 digits"
            yield key, f"{shown} is more than can be counted; at most {2**31 - 1}"
        if self.batch % self.microbatches:
            near = _nearest_multiples("batch", self.batch, self.microbatches)
            yield (
                "batch",
                f"{self.batch} rows do not divide into {self.microbatches} "
                f"microbatch{'es' * (self.microbatches > 1)}; {near}",
            )
        yield from flag_problems(self.xla)
        if self.evaluate.patience and not self.checkpoint.best:
            yield "evaluate.patience", "needs a metric; set checkpoint.best=loss"
        if self.checkpoint.store and not is_address(self.checkpoint.store):
            yield (
                "checkpoint.store",
                f"must be an address such as s3://bucket/runs, found {self.checkpoint.store!r}; a "
                f"run on another disk is a link: ln -s DISK runs",
            )
        for key, steps in self.cadences().items():
            if not isinstance(steps, Duration) and steps % self.steps_divisor:
                near = _nearest_multiples(key, steps, self.steps_divisor)
                yield (
                    key,
                    f"{steps} is not a multiple of steps_per_call, {self.steps_divisor}; {near}",
                )


def _nearest_multiples(key: str, number: int, factor: int) -> str:
    below, above = number // factor * factor, -(-number // factor) * factor
    if not below:
        return f"nearest is {above} ({key}={above})"
    return f"nearest is {below} or {above} ({key}={below})"
