"""Trains on a handful of batches until they are known by heart, or it is plain that they are not.

What cannot learn 1 batch by heart will not learn a data set: this takes seconds, and tells a
mistake in the loss, the labels or the optimizer from one that only more data would show.
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
from jtrain.io.formatting import number
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import TrainSetup
from jtrain.train.step_time import paced

SMALL, DOWN = 0.05, 0.7  # of the first loss


class RepeatedBatches:
    """The first batches, again and again."""

    def __init__(self, batches: Batches, count: int):
        self._batches, self._count = batches, count
        self.size, self.ragged = batches.size, batches.ragged

    def __getitem__(self, step: int, /) -> Batch:
        return self._batches[step % self._count]

    def shard(self, index: int, count: int) -> "RepeatedBatches":
        """The same batches, of which only the rows of one process are read."""
        return RepeatedBatches(self._batches.shard(index, count), self._count)


@dataclasses.dataclass(frozen=True)
class OverfitResult:
    """What came of it."""

    batches: int
    steps: int
    first: float
    """The loss over these batches before anything was learned of them."""
    last: float
    """The loss over their last round."""
    skipped: int
    """Steps that were not finite."""
    hidden: float
    """Share of the rows that a mask hides."""
    still: tuple[str, ...]
    """Parameters that no step has changed."""

    @property
    def small(self) -> bool:
        """Whether the loss fell to 5 % of what it was."""
        return self.first > 0 and self.last <= SMALL * self.first

    @property
    def down(self) -> bool:
        """Whether it fell by a third at least."""
        if self.first <= 0:
            return self.last < self.first - 0.3 * abs(self.first)
        return self.last <= DOWN * self.first

    def told(self) -> str:
        """What a person reads."""
        plural = "batch" if self.batches == 1 else "batches"
        went = f"{number(self.first)} -> {number(self.last)}"
        line = f"{self.batches} {plural}, {self.steps} steps: loss {went}"
        if self.small:
            return f"{line}. It learns them by heart: model, loss and optimizer can learn."
        if self.down:
            return "\n".join([f"{line}. It goes down, and is not small.", *self._slow()])
        return "\n".join(
            [f"{line}. It does not go down. What is wrong is usually:", *self._wrong()]
        )

    def _slow(self) -> list[str]:
        return [
            "  - there was not the time: steps=... or a higher optimizer.lr",
            "  - the loss has a floor: label smoothing, a KL or z-loss term, noise in the targets",
            "  - something is drawn anew at each step: dropout or augmentation; set it to 0",
            "  - weight decay, or a schedule whose warmup or end takes most of these steps",
        ]

    def _wrong(self) -> list[str]:
        told = []
        if self.skipped:
            told.append(
                f"  ! {self.skipped} of {self.steps} steps were not finite and skipped: --find-nan"
            )
        if self.hidden > 0.5:
            told.append(f"  ! the mask hides {self.hidden:.0%} of the rows")
        if self.still:
            some = ", ".join(self.still[:5])
            told.append(f"  ! no step has changed {some}: a stop_gradient, a mask, a rate of 0")
        return [
            *told,
            "  - optimizer.lr: try 10 times less and 10 times more; a warmup that never ends",
            "  - inputs and labels that do not belong together: shuffled apart, shifted by one",
            "  - the sign of the loss, or logits and probabilities taken for one another",
            "  - inputs far from 0 .. 1: scale them; or all the same: look at a batch",
        ]


def overfit(config: RunConfig, batches: int, *, tell: Callable[[str], None]) -> OverfitResult:
    """What comes of training on the first `batches` batches for as many steps as the config says.

    It ends as soon as the loss is 5 % of what it was. Nothing is written.

    Args:
        tell: takes a line now and then.

    Raises:
        ConfigError: if there is no batch to train on, or fewer steps than batches.
    """
    keep_compiled_programs()
    parts = paced(dataclasses.replace(config, steps_per_call=1))
    config = parts.config  # its durations in steps
    if not 1 <= batches <= config.steps // 2:
        raise ConfigError(
            f"--overfit {batches}: the config has {config.steps} steps, and each batch is seen at "
            f"least twice. Take --overfit 1 .. {max(1, config.steps // 2)}, or set "
            f"steps={max(2, 100 * batches)}."
        )
    repeated = RepeatedBatches(parts.experiment.train, batches)
    parts = dataclasses.replace(
        parts, experiment=dataclasses.replace(parts.experiment, train_loop=repeated)
    )
    step, state = parts.compile_step(), parts.fresh()
    before = jax.device_get(_checksums(state.params))
    hook = _Rounds(batches, config.log.every, tell)
    read = lambda call: parts.place(parts.calls[call])
    with ReadAhead(read, start=0, stop=config.steps) as feed:
        ended = train_loop(step, state, feed, start=0, stop=config.steps, hooks=[hook])
    after = jax.device_get(_checksums(ended.state.params))
    return OverfitResult(
        batches=batches,
        steps=ended.step,
        first=hook.begun,
        last=hook.ended,
        skipped=int(ended.state.skipped),
        hidden=_hidden(parts, batches),
        still=tuple(n for n, sums in after.items() if np.array_equal(sums, before[n])),
    )


class _Rounds(Hook):
    """Knows the mean loss of each round over the batches, and stops when it is small."""

    def __init__(self, batches: int, log: int, tell: Callable[[str], None]):
        self.begun = self.ended = math.nan
        self._batches, self._log, self._tell = batches, log, tell
        self._round: list[float] = []

    def on_numbers(self, step: int, numbers: Any) -> Stop | None:
        if step % self._log == 0:
            self._tell(f"step {step}  loss {number(numbers['loss'])}")
        self._round.append(numbers["loss"])
        if len(self._round) < self._batches:
            return None
        self.ended = sum(self._round) / self._batches
        self.begun = self.ended if math.isnan(self.begun) else self.begun
        self._round = []
        if self.begun > 0 and self.ended <= SMALL * self.begun:
            return Stop("the loss is small", "finished")
        return None


def _checksums(params: Any) -> dict[str, jax.Array]:
    """Of each leaf what almost any change of it changes."""
    sums = lambda leaf: jax.numpy.stack([leaf.sum(), abs(leaf).sum(), (leaf * leaf).sum()])
    return {name: sums(leaf) for name, leaf in named_leaves(params).items()}


def _hidden(parts: TrainSetup, batches: int) -> float:
    masks = [np.asarray(parts.experiment.train[i]["mask"]) for i in range(batches)]
    return float(1 - np.mean(np.concatenate(masks)))
