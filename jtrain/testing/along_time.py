"""Faults along split sequences, found from the tokens that each position depends on."""

from collections.abc import Callable

import numpy as np

from jtrain.core.types import Batch
from jtrain.testing.compare import relative_difference
from jtrain.testing.result import Cause, StepResult

SEES = 1e-4  # relative change in the loss of a position that depends on a token


def explain_time_split(
    batch: Batch,
    parts: int,
    actual: Callable[[Batch], StepResult],
    expected: Callable[[Batch], StepResult],
) -> Cause | None:
    """Return why a loss over `tokens` b t+1 of `length` b differs if t is split; None if unknown.

    For positions beside the first border of two parts, and for the last position, the tokens that
    change the loss are compared between split sequences (`actual`) and one device (`expected`).
    """
    if parts < 2 or not {"tokens", "length"} <= set(batch):
        return None
    time = batch["tokens"].shape[1] - 1
    border = time // parts  # the first position of the second part
    if time % parts or border < 2:
        return None
    split, single = _Losses(batch, actual), _Losses(batch, expected)
    tokens = sorted({0, border - 1, border, border + 1, time - 1})
    for position in (border - 2, border - 1, border, time - 1):
        for token in (
            token for token in tokens if token != position + 1
        ):  # the target of the position
            sees, should = split.sees(position, token), single.sees(position, token)
            if sees != should:
                return _mask(position, token, border, sees=sees)
    if relative_difference(split.sum_before(border), single.sum_before(border)) > SEES:
        return None
    return Cause(
        "positions",
        f"each position sees the same tokens as on one device; losses are right before position "
        f"{border}, where sequences are cut, and wrong after it: positions (rotary angles, a "
        f"learned table) restart at 0 in each part. Add the offset of the part.",
    )


def _mask(position: int, token: int, border: int, *, sees: bool) -> Cause:
    does, should = ("sees", "does not") if sees else ("does not see", "does")
    return Cause(
        "causal mask",
        f"sequences are cut at position {border}; position {position} {does} the token at "
        f"{token}, and on one device it {should}: the causal mask compares positions within the "
        f"parts. Add the offset of each part to the positions of queries and of keys.",
    )


class _Losses:
    """Sums of losses over positions, with or without a changed token."""

    def __init__(self, batch: Batch, run: Callable[[Batch], StepResult]):
        self._batch, self._run = batch, run

    def sees(self, position: int, token: int) -> bool:
        """Return whether the loss of a position changes with a token."""
        return relative_difference(self._at(position, token), self._at(position)) > SEES

    def sum_before(self, length: int, changed: int | None = None) -> float:
        """Return the sum of the losses of the positions before `length`."""
        if not length:
            return 0.0
        tokens = self._batch["tokens"].copy()
        if changed is not None:
            tokens[:, changed] = np.roll(tokens[:, changed], 1)
        lengths = np.full_like(self._batch["length"], length)
        return self._run({**self._batch, "tokens": tokens, "length": lengths}).loss * length

    def _at(self, position: int, changed: int | None = None) -> float:
        return self.sum_before(position + 1, changed) - self.sum_before(position, changed)
