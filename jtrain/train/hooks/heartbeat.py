"""Says at each step that the run lives."""

from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat


class HeartbeatHook(Hook):
    """Tells `pulse` the step; stands first, so that a hook that hangs is seen after its beat."""

    def __init__(self, *, every: int = 1, pulse: Heartbeat = HEARTBEAT):
        self.every, self._pulse = every, pulse

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Tells it; 1 us."""
        self._pulse.beat("hooks", step)
