"""Asynchronous DiLoCo: a lease is a share of the rows of some steps, and nobody waits."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jtrain.server.coordination.clock import Clock
from jtrain.server.coordination.coordinator import StepResult
from jtrain.server.coordination.leases import LeasesCoordinator
from jtrain.server.coordination.own_states import OwnStatesCoordinator
from jtrain.server.coordination.rounds import take_metrics
from jtrain.server.coordination.shard_calls import ShardsLostError
from jtrain.server.transport.wire import Message


class Unit(NamedTuple):
    """What a lease is for."""

    first: int
    last: int
    share: int


class AsyncDiLoCoCoordinator(OwnStatesCoordinator, LeasesCoordinator):
    """Coordinator of async_diloco.

    The steps between two multiples of `inner_steps` are a block, of which each worker's share of
    the rows is a unit. Units are leased in order, each once, to whoever asks. A step is done when
    all units of its block are.
    """

    def _begin(self) -> None:
        workers = self.plan.server.workers
        self._base = self._done = self._limit = self.snapshot.step
        self._begin_leases(Clock(workers=workers))
        self._next_block, self._saved_units = 0, 0
        self._reports: dict[int, Message] = {}  # by unit
        self._touched: set[int] = set()  # workers that have pushed since the snapshot

    def _block(self, block: int) -> tuple[int, int]:
        """Return the first and the last step of a block."""
        every = self.plan.inner_steps
        whole = self._base // every
        first = (whole + block) * every + 1 if block else self._base + 1
        return first, min((whole + block + 1) * every, self._limit)

    def _unit(self, number: int) -> Unit:
        block, share = divmod(number - 1, self.plan.server.workers)
        return Unit(*self._block(block), share)

    @property
    def _step(self) -> int:
        return self._done

    def _is_fresh(self, worker: int) -> bool:
        return worker not in self._touched

    def _wait_for_states(self) -> None:
        """Wait for all that are there; others that come later begin with the last snapshot."""
        most = self.plan.server.most_workers
        self._wait(lambda: all(w in self._gathered for w in self.members if w < most))

    def _updates(self) -> int:
        return self._next_block * self.plan.server.workers

    def _loaded_version(self) -> int:
        return self._saved_units if self._ready else 0

    def fetch(self, step: int):
        """Return the state on the host; it is the new snapshot."""
        state = super().fetch(step)
        with self._changed:
            self._saved_units, self._touched = self._updates(), set()
        return state

    def close(self) -> int:
        """Lease no unit of another block; return the last step of the newest one."""
        with self._changed:
            workers = self.plan.server.workers
            blocks = -(-self._clock.newest // workers)
            self._clock.limit = blocks * workers
            # Else the next `advance` would lease up to the old limit again.
            self._limit = self._block(blocks - 1)[1] if blocks else self._base
            return self._limit

    def advance(self, limit: int) -> Sequence[StepResult]:
        """Return the steps of the next block that is done."""
        workers, every = self.plan.server.workers, self.plan.inner_steps
        with self._changed:
            self._limit = max(limit, self._limit)
            blocks = -(-self._limit // every) - self._base // every
            self._clock.limit = max(blocks * workers, self._clock.limit)
            self._changed.notify_all()
        first = self._next_block * workers + 1
        units = range(first, first + workers)
        while True:
            try:
                self._wait(lambda: all(unit in self._reports for unit in units))
                break
            except ShardsLostError:
                self._recover()
        with self._changed:
            reports = {unit: self._reports.pop(unit) for unit in units}
            begin, end = self._block(self._next_block)
            self.head, results = take_metrics(self.plan, begin, end, reports)
            self._next_block, self._done = self._next_block + 1, end
        return results

    def _answer(self, request: Message, worker: int) -> Message | None:
        match request.name:
            case "lease" if worker >= self.plan.server.most_workers:  # it stands by
                return None
            case "lease":
                return (
                    self._answer_state(request, worker) if self._gathering else self._lease(worker)
                )
            case "admit":
                unit = request.fields["step"]
                if self._clock.admit(worker, unit) is None:
                    return Message("late")
                self._touched.add(worker)
                return Message("admitted")
            case "report":
                unit = request.fields["step"]
                if self._clock.report(worker, unit):
                    self.members[worker].leases += 1
                    self._reports[unit] = request
                    self._changed.notify_all()
                return Message("thanks")
        return self._answer_state(request, worker)

    def _lease(self, worker: int) -> Message | None:
        lease = self._clock.lease(worker)
        if lease is None:
            return None
        unit = self._unit(lease.step)
        head = dataclasses.replace(self.head, step=jnp.int32(unit.first - 1))
        fields = {**unit._asdict(), "number": lease.step, "epoch": self.epoch}
        return self._send_head(head, fields)
