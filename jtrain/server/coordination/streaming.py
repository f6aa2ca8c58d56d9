"""Streaming DiLoCo: rounds that end with the push of a fragment, and overlap with the next one."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jtrain.core.state import TrainState
from jtrain.server.coordination.coordinator import StepResult
from jtrain.server.coordination.own_states import OwnStatesCoordinator
from jtrain.server.coordination.rounds import RoundCoordinator, take_metrics
from jtrain.server.plan.fragment_schedule import StreamingRound
from jtrain.server.transport.wire import Message


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
