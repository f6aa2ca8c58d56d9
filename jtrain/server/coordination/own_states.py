"""Coordinator that collects what each worker alone knows, before the state is read."""

import abc
import dataclasses
from typing import Any

import jax
import numpy as np

from jtrain.server.coordination.coordinator import Coordinator
from jtrain.server.transport.wire import Message


class OwnStatesCoordinator(Coordinator):
    """Coordinator of workers that keep a state over many leases, each by its number.

    A worker that asks for a lease while the state is read is asked for its own instead.
    """

    _gathering = False

    def _complete(self) -> None:
        with self._changed:
            self._gathered: dict[int, Any] = {}
            self._gathering = True
            self._changed.notify_all()
        try:
            self._wait_for_states()
        finally:
            with self._changed:
                self._gathering = False
        for worker, state in self._gathered.items():
            self._inner[worker] = state

    @abc.abstractmethod
    def _wait_for_states(self) -> None:
        """Wait until `_gathered` has the states of all workers."""

    def _is_fresh(self, worker: int) -> bool:
        """Return whether a worker has pushed nothing since the snapshot."""
        del worker
        return True

    def _answer_state(self, request: Message, worker: int) -> Message | None:
        """Return the answer to a request that is about a worker's own state."""
        match request.name:
            case "lease":
                if worker in self._gathered:
                    return None
                fields = {"first": self._step + 1, "epoch": self.epoch}
                return dataclasses.replace(self._send_head(self.head, fields), name="gather")
            case "keep":
                if self._gathering and request.fields["epoch"] == self.epoch:
                    tree = jax.tree.structure(self.plan.inner_state)
                    self._gathered[worker] = tree.unflatten(request.arrays)
                    self.state_bytes += request.frame_bytes
                    self._changed.notify_all()
                return Message("thanks")
            case "inner":
                arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(self._inner[worker])]
                self.state_bytes += sum(array.nbytes for array in arrays)
                return Message("inner", {"fresh": self._is_fresh(worker)}, arrays)
        raise ValueError(f"unknown request {request.name!r}")
