"""Heartbeat hook: each step is reported to the heartbeat."""

from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat


class HeartbeatHook(Hook):
    """Hook that reports the step; it comes first, so that a later hook that hangs is noticed."""

    def __init__(self, *, every: int = 1, pulse: Heartbeat = HEARTBEAT):
        self.every, self._heartbeat = every, pulse

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Report the step; 1 us."""
        self._heartbeat.beat("hooks", step)
