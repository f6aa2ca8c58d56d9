"""The clock of workers: leases, staleness and its bound, and the step of a lost worker."""

import random

import pytest

from jtrain.parallel.strategies.server_modes import Apply, Compensate, Drop, Scale
from jtrain.server.coordination.clock import Clock
from jtrain.server.shards.sequence import Applied
from jtrain.server.shards.staleness import treat


class Simulation:
    """Workers with random delays on a clock of the simulation, and some that die."""

    def __init__(self, clock, workers, steps, seed, deaths=0.0):
        self.clock, self.workers, self.steps = clock, workers, steps
        self.draw, self.deaths = random.Random(seed), deaths
        self.done: list[int] = []
        self.staleness: list[int] = []
        self.most_ahead = 0

    def run(self):
        clock, draw = self.clock, self.draw
        clock.limit = self.steps
        speed = [draw.choice([1.0, 1.0, 3.0, 10.0]) for _ in range(self.workers)]
        phase = dict.fromkeys(range(self.workers), "idle")
        due = {worker: 0.0 for worker in phase}
        applied: set[int] = set()
        seen: dict[int, int] = {}  # updates in what a worker has pulled
        now = 0.0
        while len(self.done) < self.steps:
            worker = min(due, key=lambda w: (due[w], w))
            now = max(now, due[worker])
            due[worker] = now + draw.expovariate(1.0 / speed[worker])
            if draw.random() < self.deaths and len(clock.clocks) > 1:
                clock.leave(worker)
                phase[worker] = "idle"
                continue
            lease = clock.lease(worker)
            if lease is None:
                due[worker] = now + 0.1
                continue
            if phase[worker] == "idle":
                seen[worker] = len(applied)
                phase[worker] = "computes"
            elif phase[worker] == "computes":
                stale = clock.admit(worker, lease.step)
                assert stale is not None
                assert clock.admit(worker, lease.step) == stale, "asked twice"
                self.staleness.append(stale)
                assert len(applied) - seen[worker] <= stale, "updates that it did not see"
                phase[worker] = "pushes"
                due[worker] = now + draw.expovariate(5.0)
            else:
                applied.add(lease.step)
                assert clock.report(worker, lease.step)
                assert not clock.report(worker, lease.step), "the second report counts nothing"
                self.done.append(lease.step)
                phase[worker] = "idle"
                ahead = max(clock.clocks.values()) - min(clock.clocks.values())
                self.most_ahead = max(self.most_ahead, ahead)
        return self


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("bound", "workers"),
    [pytest.param(0, 4, marks=THOROUGH), (1, 4), pytest.param(3, 6, marks=THOROUGH)],
)
def test_the_bound_holds_for_ten_thousand_steps_of_random_delays(bound, workers):
    found = Simulation(Clock(workers=workers, bound=bound), workers, 10_000, seed=bound).run()
    most = (2 * bound + 1) * (workers - 1)
    assert max(found.staleness) <= most
    assert found.most_ahead <= bound + 1
    assert sorted(found.done) == list(range(1, 10_001)), "each batch once"


def test_without_a_bound_a_slow_worker_is_left_behind():
    found = Simulation(Clock(workers=4), 4, 2_000, seed=5).run()
    assert max(found.staleness) > 9
    assert found.most_ahead > 100


def test_a_worker_ten_times_slower_holds_nobody_up_within_the_bound():
    """Throughput of ssp on a clock of the simulation: 3.1 of 4 even workers, less the waiting."""
    done = {}
    for slow in (1.0, 10.0):
        clock = Clock(workers=4, bound=10)
        clock.limit, now, free = 10**6, 0.0, dict.fromkeys(range(4), 0.0)
        while now < 1000:
            worker = min(free, key=lambda w: (free[w], w))
            now = free[worker]
            if worker in clock.leases:
                step = clock.leases[worker].step
                clock.admit(worker, step)
                clock.report(worker, step)
            leased = clock.lease(worker)
            free[worker] = now + (0.1 if leased is None else slow if worker == 0 else 1.0)
        done[slow] = clock.newest
    assert done[10.0] >= 0.7 * done[1.0]


@pytest.mark.parametrize("bound", [None, 2])
def test_each_step_is_taken_once_though_workers_die(bound):
    clock = Clock(workers=4, bound=bound)
    found = Simulation(clock, 4, 3_000, seed=1, deaths=0.02).run()
    assert sorted(found.done) == list(range(1, 3_001))
    assert not clock.leases


def test_no_step_is_leased_beyond_the_limit():
    clock = Clock(7, workers=2)
    clock.limit = 8
    lease = clock.lease(0)
    assert lease is not None
    assert lease.step == 8
    assert clock.lease(1) is None
    assert clock.lease(0) == lease, "the same one, asked again"
    clock.leave(0)
    again = clock.lease(1)
    assert again is not None
    assert again.step == 8
    assert clock.admit(0, 8) is None, "the lease is another's"
    assert not clock.report(0, 8)


def test_pushes_that_come_again_are_known():
    applied = Applied(3)
    assert 3 in applied
    assert 4 not in applied
    for number in (5, 4, 7):
        applied.add(number)
    assert applied.low == 5
    assert [number in applied for number in (4, 5, 6, 7)] == [True, True, False, True]
    assert len(applied) == 6


def test_treatments_are_those_of_the_papers():
    assert treat(Apply(), 9).factor == 1
    assert treat(Scale(), 3).factor == 0.25
    assert [treat(Drop(limit=2), t).factor for t in (2, 3)] == [1, 0]
    assert treat(Compensate(strength=0.5), 1) == (1, 0.5)
