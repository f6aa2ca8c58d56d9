"""What is wrong along sequences that are split, seen from which tokens a position sees."""

from collections.abc import Callable

import numpy as np

from jtrain.core.types import Batch
from jtrain.testing.cause import Cause
from jtrain.testing.compare import near
from jtrain.testing.result import StepResult

SEES = 1e-4  # relative: what a token changes in the loss of a position that sees it


def cause_along_time(
    batch: Batch,
    parts: int,
    got: Callable[[Batch], StepResult],
    want: Callable[[Batch], StepResult],
) -> Cause | None:
    """Why a loss over `tokens` b t+1 of `length` b differs where t is in `parts`; None if unknown.

    Of positions beside the first border of two parts, and of the last, it is looked which tokens
    change their loss, where sequences are split (`got`) and on one device (`want`).
    """
    if parts < 2 or not {"tokens", "length"} <= set(batch):
        return None
    time = batch["tokens"].shape[1] - 1
    border = time // parts  # the first position of the second part
    if time % parts or border < 2:
        return None
    here, there = _Losses(batch, got), _Losses(batch, want)
    tokens = sorted({0, border - 1, border, border + 1, time - 1})
    for position in (border - 2, border - 1, border, time - 1):
        for token in (token for token in tokens if token != position + 1):  # which is its target
            sees, should = here.sees(position, token), there.sees(position, token)
            if sees != should:
                return _mask(position, token, border, sees=sees)
    if near(here.upto(border), there.upto(border)) > SEES:
        return None
    return Cause(
        "positions",
        f"each position sees the tokens that it sees on one device; before position {border}, "
        f"where sequences are cut, losses are right and behind it wrong: positions (rotary "
        f"angles, a learned table) begin again in each part. Add where the part begins.",
    )


def _mask(position: int, token: int, border: int, *, sees: bool) -> Cause:
    does, should = ("sees", "does not") if sees else ("does not see", "does")
    return Cause(
        "causal mask",
        f"sequences are cut at position {border}; there position {position} {does} the token at "
        f"{token}, and on one device it {should}: the causal mask compares positions within the "
        f"parts. Add where each part begins, of queries and of keys.",
    )


class _Losses:
    """Sums of losses over positions, with a token changed or not."""

    def __init__(self, batch: Batch, run: Callable[[Batch], StepResult]):
        self._batch, self._run = batch, run

    def sees(self, position: int, token: int) -> bool:
        """Whether the loss of a position changes with a token."""
        return near(self._at(position, token), self._at(position)) > SEES

    def upto(self, length: int, changed: int | None = None) -> float:
        """Of the positions before `length`."""
        if not length:
            return 0.0
        tokens = self._batch["tokens"].copy()
        if changed is not None:
            tokens[:, changed] = np.roll(tokens[:, changed], 1)
        lengths = np.full_like(self._batch["length"], length)
        return self._run({**self._batch, "tokens": tokens, "length": lengths}).loss * length

    def _at(self, position: int, changed: int | None = None) -> float:
        return self.upto(position + 1, changed) - self.upto(position, changed)
