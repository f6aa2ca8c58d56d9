"""Coordinators of DiLoCo whose workers do not wait for one another: streaming, and asynchronous."""

import dataclasses
from collections import Counter
from typing import Any

from jtrain.core.state import TrainState
from jtrain.server.coordinator import Steps
from jtrain.server.paced import Clock, LeasesCoordinator
from jtrain.server.partition import StreamingRound
from jtrain.server.rounds import RoundCoordinator, take_metrics
from jtrain.server.wire import Message


@dataclasses.dataclass
class _Open:
    """A round that workers take part in."""

    round: StreamingRound
    numbers: dict[int, int]
    """The update of each fragment that is pushed."""
    reports: dict[int, Message] = dataclasses.field(default_factory=dict)


class StreamingCoordinator(RoundCoordinator):
    """Coordinator of streaming_diloco: each worker has the share of its number.

    A worker that has reported a round begins the next one. It waits for the others where it merges
    what they all have pushed, so that at most two rounds are open.
    """

    def _begin(self) -> None:
        super()._begin()
        self._rounds: list[_Open] = []
        self._numbers: Counter[int] = Counter()
        self._limit = self.done

    def _updates(self) -> None:
        return None

    def _stop(self) -> None:
        self._rounds, self._limit = [], self.done

    def _clocks(self) -> dict[int, int]:
        clocks = dict.fromkeys(range(self.plan.server.workers), self.done)
        for each in self._rounds:
            clocks |= dict.fromkeys(each.reports, each.round.last)
        return clocks

    def close(self) -> int:
        """Return the last step of the rounds that are open."""
        with self._changed:
            self._limit = self._rounds[-1].round.last if self._rounds else self.done
            return self._limit

    def _advance(self, limit: int) -> Steps:
        with self._changed:
            self._limit = limit
            if not self._rounds:
                self._open_round()
            current = self._rounds[0]
        self._wait(lambda: len(current.reports) == self.plan.server.workers)
        reports = dict(sorted(current.reports.items()))
        factors = self._factors(reports)
        for fragment, number in current.numbers.items():
            which: dict[str, Any] = {"fragment": fragment, "number": number}
            self._apply(True, 0.0, self._reduce(factors, which), which)
        first, last = current.round.first, current.round.last
        self.head, results = take_metrics(self.plan, first, last, reports)
        with self._changed:
            self._rounds.pop(0)
            self.done = last
            self._changed.notify_all()
        return results

    def _open_round(self) -> None:
        done = self._rounds[-1].round.last if self._rounds else self.done
        found = self.plan.fragment_schedule.round_after(done, self._limit)
        self._numbers.update(found.pushes)
        numbers = {p: self._loaded_version() + self._numbers[p] for p in found.pushes}
        self._rounds.append(_Open(found, numbers))

    def _lease(self, worker: int) -> Message | None:
        ahead = self._rounds and worker in self._rounds[0].reports and len(self._rounds) == 1
        if ahead and self._rounds[-1].round.last < self._limit:
            self._open_round()
        found = next((each for each in self._rounds if worker not in each.reports), None)
        if found is None:
            return None
        self._shares.all[worker].worker = worker
        fields = {**found.round._asdict(), "numbers": [*found.numbers.items()], "share": worker}
        return self._send_lease(found.round.first, fields)

    def _answer(self, request: Message, worker: int) -> Message | None:
        fields, late = request.fields, request.fields["epoch"] != self.epoch
        match request.name:
            case "merge" if late or self.done >= fields["step"]:
                return Message("late" if late else "merge")
            case "merge":
                return None
            case "report":
                for each in self._rounds:
                    first = each.round.first == fields["step"] and worker not in each.reports
                    if first and not late:
                        each.reports[worker] = request
                        self._shares.report(worker, each.round.last)
                        self.members[worker].leases += 1
                        self._changed.notify_all()
                return Message("thanks")
        raise ValueError(f"unknown request {request.name!r}")


class AsyncDiLoCoCoordinator(LeasesCoordinator):
    """Coordinator of async_diloco.

    The steps between two multiples of `inner_steps` are a block, of which each worker's share of
    the rows is a unit. Units are leased in order, each once, to whoever asks. A step is done when
    all units of its block are. The state of a worker is that of the share of its number.
    """

    def _begin(self) -> None:
        super()._begin()
        self._clock = Clock(workers=self.plan.server.workers)
        self._base = self._limit = self.done
        self._next_block = self._saved_units = 0
        self._reports: dict[int, Message] = {}  # by unit

    def _block(self, block: int) -> tuple[int, int]:
        """Return the first and the last step of a block."""
        every = self.plan.inner_steps
        whole = self._base // every
        first = (whole + block) * every + 1 if block else self._base + 1
        return first, min((whole + block + 1) * every, self._limit)

    def _updates(self) -> int:
        return self._next_block * self.plan.server.workers

    def _loaded_version(self) -> int:
        return self._saved_units if self._ready else 0

    def fetch(self, step: int) -> TrainState:
        """Return the state on the host; it is the new snapshot."""
        state = super().fetch(step)
        self._saved_units = self._updates()
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

    def _advance(self, limit: int) -> Steps:
        """Return the steps of the next block that is done."""
        workers, every = self.plan.server.workers, self.plan.inner_steps
        with self._changed:
            self._limit = max(limit, self._limit)
            blocks = -(-self._limit // every) - self._base // every
            self._clock.limit = max(blocks * workers, self._clock.limit)
        first = self._next_block * workers + 1
        units = range(first, first + workers)
        self._wait(lambda: all(unit in self._reports for unit in units))
        with self._changed:
            reports = {unit: self._reports.pop(unit) for unit in units}
            begin, self.done = self._block(self._next_block)
            self.head, results = take_metrics(self.plan, begin, self.done, reports)
            self._next_block += 1
        return results

    def _lease(self, worker: int) -> Message | None:
        lease = self._clock.lease(worker)
        if lease is None:
            return None
        block, share = divmod(lease.step - 1, self.plan.server.workers)
        first, last = self._block(block)
        return self._send_lease(first, {"last": last, "share": share, "number": lease.step})

    def _admit(self, worker: int, staleness: int) -> Message:
        del staleness
        self._shares.all[worker].worker = worker
        self._shares.report(worker, self._clock.leases[worker].step)
        return Message("admitted", {"factor": 1.0, "compensate": 0.0})

    def _take(self, report: Message, number: int, staleness: int) -> None:
        del staleness
        self._reports[number] = report
