"""Treatment of a gradient that was computed from older parameters."""

from typing import NamedTuple

from jtrain.parallel.strategies.server_modes import Compensate, Drop, Scale, Staleness


class Treatment(NamedTuple):
    """How a gradient is applied."""

    factor: float
    """Factor of the gradient; 0: it is dropped."""
    compensate: float = 0.0
    """Strength of the correction for what has changed since."""


def treat(policy: Staleness, staleness: int) -> Treatment:
    """Return the treatment of a gradient, by the updates since its parameters were pulled."""
    if isinstance(policy, Scale):
        return Treatment(1 / (1 + staleness))
    if isinstance(policy, Drop):
        return Treatment(float(staleness <= policy.limit))
    if isinstance(policy, Compensate):
        return Treatment(1.0, policy.strength)
    return Treatment(1.0)
