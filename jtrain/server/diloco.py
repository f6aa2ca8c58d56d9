"""DiLoCo whose workers keep a state of their own over many leases: streaming, and asynchronous."""

import abc
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.state import TrainState
from jtrain.server.client import ShardsLostError
from jtrain.server.coordinator import Coordinator, StepResult
from jtrain.server.fragments import StreamingRound
from jtrain.server.paced import Clock, LeasesCoordinator
from jtrain.server.rounds import RoundCoordinator, take_metrics
from jtrain.server.wire import Message


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


@dataclasses.dataclass
class _Open:
    """A round that workers take part in."""

    round: StreamingRound
    numbers: dict[int, int]
    """The update of each fragment that is pushed."""
    reports: dict[int, Message] = dataclasses.field(default_factory=dict)


class StreamingCoordinator(OwnStatesCoordinator, RoundCoordinator):
    """Coordinator of streaming_diloco.

    A worker that has reported a round begins the next one. It waits for the others where it merges
    what they all have pushed, so that at most two rounds are open.
    """

    def _begin(self) -> None:
        super()._begin()
        self._rounds: list[_Open] = []
        self._numbers: Counter[int] = Counter()
        self._limit = self._done
        self._advanced: set[int] = set()  # workers whose state the snapshot has not

    def _updates(self) -> None:
        return None

    def _first_update(self) -> int:
        return super()._first_update() * self.plan.fragments

    def _give_back(self, worker: int) -> None:
        """Note that a worker's state is lost; one that takes its place begins with the snapshot."""
        if worker in self._advanced:
            self._lost_shares.add(worker)

    def fetch(self, step: int) -> TrainState:
        """Return the state on the host; it is the new snapshot."""
        state = super().fetch(step)
        with self._changed:
            self._advanced = set()
        return state

    def _wait_for_states(self) -> None:
        self._wait_for_shares(lambda: len(self._gathered) == self.plan.server.workers)

    def _recover(self) -> None:
        with self._changed:
            self._rounds, self._limit = [], self._done  # nothing is leased while they are loaded
        super()._recover()

    def _clocks(self) -> dict[int, int]:
        clocks = dict.fromkeys(range(self.plan.server.workers), self._done)
        for each in self._rounds:
            clocks |= dict.fromkeys(each.reports, each.round.last)
        return clocks

    def close(self) -> int:
        """Return the last step of the rounds that are open."""
        with self._changed:
            self._limit = self._rounds[-1].round.last if self._rounds else self._done
            return self._limit

    def _working(self) -> set[int]:
        return {w for w in self.members if any(w not in each.reports for each in self._rounds)}

    def _advance(self, limit: int) -> Sequence[StepResult]:
        with self._changed:
            self._limit = limit
            if not self._rounds:
                self._open_round()
            current = self._rounds[0]
            self._changed.notify_all()
        self._wait_for_shares(lambda: len(current.reports) == self.plan.server.workers)
        results = self._end_round(current)
        with self._changed:
            self._rounds.pop(0)
            self._done = current.round.last
            self._changed.notify_all()
        return results

    def _open_round(self) -> None:
        done = self._rounds[-1].round.last if self._rounds else self._done
        found = self.plan.fragment_schedule.round_after(done, self._limit)
        self._numbers.update(found.pushes)
        numbers = {p: self._loaded_version() + self._numbers[p] for p in found.pushes}
        self._rounds.append(_Open(found, numbers))

    def _answer(self, request: Message, worker: int) -> Message | None:
        match request.name:
            case "lease":
                if self._gathering and worker < self.plan.server.workers:
                    return self._answer_state(request, worker)
                return self._lease(worker)
            case "merge":
                if request.fields["epoch"] != self.epoch:
                    return Message("late")
                return Message("merge") if self._done >= request.fields["step"] else None
            case "report":
                self._take_report(request, worker)
                return Message("thanks")
        return self._answer_state(request, worker)

    def _lease(self, worker: int) -> Message | None:
        if worker >= self.plan.server.workers:  # it stands by
            return None
        ahead = self._rounds and worker in self._rounds[0].reports and len(self._rounds) == 1
        if ahead and self._rounds[-1].round.last < self._limit:
            self._open_round()
        found = next((each for each in self._rounds if worker not in each.reports), None)
        if found is None:
            return None
        fields = {**found.round._asdict(), "numbers": [*found.numbers.items()]}
        return self._send_head(self.head, {**fields, "epoch": self.epoch})

    def _take_report(self, request: Message, worker: int) -> None:
        fields = request.fields
        for each in self._rounds:
            if fields["epoch"] == self.epoch and each.round.first == fields["step"]:
                each.reports.setdefault(worker, request)
                self._advanced.add(worker)
                self.members[worker].leases += 1
                self._changed.notify_all()

    def _end_round(self, current: _Open) -> list[StepResult]:
        reports = dict(sorted(current.reports.items()))
        factors = self._factors(reports)
        for fragment, number in current.numbers.items():
            which: dict[str, Any] = {"fragment": fragment, "number": number}
            self._apply(True, 0.0, self._reduce(factors, which), which)
        first, last = current.round.first, current.round.last
        self.head, results = take_metrics(self.plan, first, last, reports)
        return results


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
