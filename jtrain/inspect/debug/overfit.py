"""Overfitting of a few batches, as a check that model, loss and optimizer can learn.

A run that cannot memorize one batch will not learn a data set. The check takes seconds and finds
errors in the loss, the labels or the optimizer.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.core.batches import Batches
from jtrain.core.loop import Hook, Stop, train_loop
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.errors import ConfigError
from jtrain.io.formatting import format_number
from jtrain.train.compilation_cache import enable_compilation_cache
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup
from jtrain.train.step_time import set_up_with_step_time

SMALL, DOWN = 0.05, 0.7  # fractions of the first loss


class RepeatedBatches:
    """The first batches, repeated."""

    def __init__(self, batches: Batches, count: int):
        self._batches, self._count = batches, count
        self.size, self.ragged = batches.size, batches.ragged

    def __getitem__(self, step: int, /) -> Batch:
        return self._batches[step % self._count]

    def shard(self, index: int, count: int) -> "RepeatedBatches":
        """Return the same batches, reading only the rows of one process."""
        return RepeatedBatches(self._batches.shard(index, count), self._count)


@dataclasses.dataclass(frozen=True)
class OverfitResult:
    """The result of overfitting."""

    batches: int
    steps: int
    first: float
    """Mean loss over the first round of the batches."""
    last: float
    """Mean loss over the last round."""
    skipped: int
    """Number of skipped nonfinite steps."""
    hidden: float
    """Fraction of the rows that a mask hides."""
    unchanged: tuple[str, ...]
    """Parameters that no step changed."""

    @property
    def small(self) -> bool:
        """True if the loss fell to 5 % of the first loss."""
        return self.first > 0 and self.last <= SMALL * self.first

    @property
    def down(self) -> bool:
        """True if the loss fell by at least 30 %."""
        if self.first <= 0:
            return self.last < self.first - 0.3 * abs(self.first)
        return self.last <= DOWN * self.first

    def describe(self) -> str:
        """Return the result as text, with likely causes of a failure."""
        plural = "batch" if self.batches == 1 else "batches"
        losses = f"{format_number(self.first)} -> {format_number(self.last)}"
        line = f"{self.batches} {plural}, {self.steps} steps: loss {losses}"
        if self.small:
            return f"{line}. It memorizes them: model, loss and optimizer can learn."
        if self.down:
            return "\n".join(
                [f"{line}. It decreases, but is not small. Possible causes:", *self._slow_causes()]
            )
        return "\n".join([f"{line}. It does not decrease. Common causes:", *self._failure_causes()])

    def _slow_causes(self) -> list[str]:
        return [
            "  - too few steps: raise steps=... or optimizer.lr",
            "  - the loss has a floor: label smoothing, a KL or z-loss term, noise in the targets",
            "  - new random draws at each step: dropout or augmentation; set it to 0",
            "  - weight decay, or a schedule whose warmup or decay takes most of these steps",
        ]

    def _failure_causes(self) -> list[str]:
        notes = []
        if self.skipped:
            notes.append(
                f"  ! {self.skipped} of {self.steps} steps were not finite and skipped: --find-nan"
            )
        if self.hidden > 0.5:
            notes.append(f"  ! the mask hides {self.hidden:.0%} of the rows")
        if self.unchanged:
            some = ", ".join(self.unchanged[:5])
            notes.append(
                f"  ! no step changed {some}: a stop_gradient, a mask, a learning rate of 0"
            )
        return [
            *notes,
            "  - optimizer.lr: try a tenth and ten times; a warmup that never ends",
            "  - inputs and labels that do not match: shuffled separately, shifted by one",
            "  - the sign of the loss, or logits confused with probabilities",
            "  - inputs far from 0 .. 1: scale them; or all equal: inspect a batch",
        ]


def overfit(config: RunConfig, batches: int, *, log: Callable[[str], None]) -> OverfitResult:
    """Train on the first `batches` batches for the steps of the config.

    Training stops as soon as the loss is 5 % of the first loss. Nothing is written.

    Args:
        log: called with a line every `log.every` steps.

    Raises:
        ConfigError: if there is no batch to train on, or fewer steps than batches.
    """
    enable_compilation_cache()
    setup = set_up_with_step_time(dataclasses.replace(config, steps_per_call=1))
    config = setup.config  # with durations in steps
    if not 1 <= batches <= config.steps // 2:
        raise ConfigError(
            f"--overfit {batches}: the config has {config.steps} steps, and each batch is used at "
            f"least twice. Write --overfit 1 .. {max(1, config.steps // 2)}, or set "
            f"steps={max(2, 100 * batches)}."
        )
    repeated = RepeatedBatches(setup.experiment.train, batches)
    setup = dataclasses.replace(
        setup, experiment=dataclasses.replace(setup.experiment, train=repeated)
    )
    step, state = setup.compile_step(), setup.fresh()
    before = jax.device_get(_checksums(state.params))
    hook = _Rounds(batches, config.log.every, log)
    read = lambda call: setup.place(setup.calls[call])
    with ReadAhead(read, start=0, stop=config.steps) as feed:
        result = train_loop(step, state, feed, start=0, stop=config.steps, hooks=[hook])
    after = jax.device_get(_checksums(result.state.params))
    return OverfitResult(
        batches=batches,
        steps=result.step,
        first=hook.first_loss,
        last=hook.last_loss,
        skipped=int(result.state.skipped),
        hidden=_hidden_fraction(setup, batches),
        unchanged=tuple(n for n, sums in after.items() if np.array_equal(sums, before[n])),
    )


class _Rounds(Hook):
    """Hook that averages the loss over each round of the batches, and stops when it is small."""

    def __init__(self, batches: int, log_every: int, log: Callable[[str], None]):
        self.first_loss = self.last_loss = math.nan
        self._batches, self._log_every, self._log = batches, log_every, log
        self._round: list[float] = []

    def on_numbers(self, step: int, numbers: Any) -> Stop | None:
        if step % self._log_every == 0:
            self._log(f"step {step}  loss {format_number(numbers['loss'])}")
        self._round.append(numbers["loss"])
        if len(self._round) < self._batches:
            return None
        self.last_loss = sum(self._round) / self._batches
        self.first_loss = self.last_loss if math.isnan(self.first_loss) else self.first_loss
        self._round = []
        if self.first_loss > 0 and self.last_loss <= SMALL * self.first_loss:
            return Stop("the loss is small", "finished")
        return None


def _checksums(params: Any) -> dict[str, jax.Array]:
    """Return sums for each leaf that change with almost any change of the leaf."""
    sums = lambda leaf: jax.numpy.stack([leaf.sum(), abs(leaf).sum(), (leaf * leaf).sum()])
    return {name: sums(leaf) for name, leaf in named_leaves(params).items()}


def _hidden_fraction(setup: TrainSetup, batches: int) -> float:
    masks = [np.asarray(setup.experiment.train[i]["mask"]) for i in range(batches)]
    return float(1 - np.mean(np.concatenate(masks)))
