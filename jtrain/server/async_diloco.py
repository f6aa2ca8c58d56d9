"""Coordinator of asynchronous DiLoCo, whose workers take local steps and wait for no other."""

from jtrain.core.state import TrainState
from jtrain.server.coordinator import Steps
from jtrain.server.paced import Clock, LeasesCoordinator
from jtrain.server.rounds import take_metrics
from jtrain.server.wire import Message


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
