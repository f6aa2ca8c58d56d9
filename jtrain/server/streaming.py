"""Coordinator of streaming DiLoCo, whose workers go on while others push."""

import dataclasses
from collections import Counter
from typing import Any

from jtrain.server.coordinator import Steps
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
