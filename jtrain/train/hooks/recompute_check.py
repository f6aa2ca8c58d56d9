"""Recompute check: some steps are computed twice, from the same state and batch, and compared.

A processor that sometimes computes wrongly gives finite and plausible numbers: 1 in 100 such errors
makes a NaN (Jiang et al. 2026, arXiv:2605.04213), and a falling loss proves nothing. The same
program on the same devices gives the same bits; if it does not, a device has failed.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.checkpoint import leaf_table
from jtrain.core.types import Metrics
from jtrain.errors import DeviceError
from jtrain.parallel import fingerprint
from jtrain.parallel.fingerprint import PendingSums

NAMED = 3  # leaves that an error names


class RecomputeCheck:
    """Step wrapper that computes each `every`-th step twice; the first result is used.

    The states are compared on their devices, by fingerprints. These are read once they are
    computed, so nothing waits for them; `compare_all` waits, before a state is saved.

    Args:
        every: steps; a call ends at each multiple.
        after: gives the last step of the call after a step.
        start: the step that the run resumes from.
    """

    def __init__(
        self,
        *,
        every: int,
        after: Callable[[int], int] = lambda step: step + 1,
        start: int = 0,
    ):
        self._cadence, self._step, self._after = every, start, after
        self._pending: collections.deque[tuple[int, PendingSums, PendingSums]] = collections.deque()

    def wrap(self, step: Callable[[Any, Any], tuple[Any, Metrics]]):
        """Return the same step with some calls made twice.

        Such a call needs the memory of a second state.
        """

        def checked_step(state: Any, batch: Any) -> tuple[Any, Metrics]:
            while self._pending and all(map(fingerprint.is_ready, self._pending[0][1:])):
                _check_equal(*self._pending.popleft())
            self._step = self._after(self._step)
            if self._step % self._cadence:
                return step(state, batch)
            copy = jax.tree.map(jnp.copy, state)
            first, metrics = step(state, batch)
            second, _ = step(copy, batch)
            prints = lambda state: fingerprint.start(leaf_table.flatten(state))
            self._pending.append((self._step, prints(first), prints(second)))
            return first, metrics

        return checked_step

    def compare_all(self) -> None:
        """Compare all pending steps.

        Raises:
            DeviceError: if the results of a step differ, with the leaves and devices.
        """
        while self._pending:
            _check_equal(*self._pending.popleft())


def _check_equal(step: int, first: PendingSums, second: PendingSums) -> None:
    one, other = fingerprint.local_prints(first), fingerprint.local_prints(second)
    different = [name for name in one if one[name] != other[name]]
    if not different:
        return
    devices = sorted({d for name in different for d in _different(one[name], other[name])})
    more = f" and {len(different) - NAMED} more" if len(different) > NAMED else ""
    raise DeviceError(
        f"step {step} was computed twice from the same state and batch, and the results differ in "
        f"{', '.join(different[:NAMED])}{more}, on {', '.join(devices)}. A device computes "
        f"wrongly. Nothing was saved since; run again to resume from the newest checkpoint, and "
        f"leave out a device that is named repeatedly."
    )


def _different(one: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> set[str]:
    pairs = lambda prints: {(device, p) for p, devices in prints.items() for device in devices}
    return {device for device, _ in pairs(one) ^ pairs(other)}
