"""Runs on parameter servers whose processes are threads of the test, and runs on one device."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from quick_study import config_of

from jtrain.core.loop import Hook, LoopResult, train_loop
from jtrain.server.checks import check_plan
from jtrain.server.coordinator import Coordinator
from jtrain.server.loop import take_steps
from jtrain.server.paced import PacedCoordinator
from jtrain.server.plan import Plan
from jtrain.server.process import serve, work
from jtrain.server.rounds import RoundCoordinator
from jtrain.server.supervisor import open_cluster
from jtrain.train.setup import TrainSetup, set_up

SERVER = "parallel={kind: server, workers: %d, shards: %d, timeout: 20, mode: %s}"


class ThreadProcess:
    """A worker or a server in a thread; a kill takes the server away, as far as a thread can."""

    def __init__(self, role, index, plan, environ):
        self.end, self.error = "", ""
        self._listener = None
        if role == "shard":
            self._listener = serve(plan, index, environ)
            return
        self._thread = threading.Thread(target=self._work, args=(plan, index, environ), daemon=True)
        self._thread.start()

    def _work(self, plan, index, environ):
        try:
            work(plan, index, environ)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}\n"
            self.end = "exit code 1"

    def output(self) -> str:
        return self.error

    def kill(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self.end = self.end or "SIGKILL"


class ThreadEngine:
    """Starts threads in the place of processes."""

    def __init__(self, plan: Plan, environ=None):
        self._plan, self._environ = plan, environ or {}

    def start(self, role, index, environ) -> ThreadProcess:
        return ThreadProcess(role, index, self._plan, {**environ, **self._environ})


def server_setup(path: Path, mode: str, *settings: str, workers=2, shards=1) -> TrainSetup:
    return set_up(config_of(path, [SERVER % (workers, shards, mode), *settings]))


@contextlib.contextmanager
def cluster(setup: TrainSetup, log: Callable[[str], None] = print, environ=None) -> Iterator[tuple]:
    """Coordinator and supervisor of a run in threads."""
    plan = Plan(setup)
    check_plan(plan)
    make = PacedCoordinator if plan.has_clock else RoundCoordinator
    with open_cluster(plan, ThreadEngine(plan, environ), make, log) as (coordinator, supervisor, _):
        yield coordinator, supervisor


def train_on_servers(
    setup: TrainSetup,
    *,
    hooks: Sequence[Hook] = (),
    meddle: Callable[[Coordinator], None] | None = None,
    log: Callable[[str], None] = print,
    environ=None,
) -> LoopResult:
    """Train in threads."""
    state = setup.fresh()
    with cluster(setup, log, environ) as (coordinator, supervisor):
        coordinator.start(0, state)
        if meddle is not None:
            meddle(coordinator, supervisor)
        stop = setup.config.steps
        return take_steps(coordinator, state, start=0, stop=stop, hooks=hooks)


def train_on_one_device(path: Path, *settings: str, hooks: Sequence[Hook] = ()) -> LoopResult:
    """Train with the loop of one program."""
    setup = set_up(config_of(path, settings))
    batches = (setup.place(setup.train[step]) for step in range(setup.config.steps))
    step, stop = setup.compile_step(), setup.config.steps
    return train_loop(step, setup.fresh(), batches, start=0, stop=stop, hooks=hooks)


def host(tree):
    return jax.tree.map(np.asarray, tree)


class Losses(Hook):
    """Hook that keeps the numbers of each step."""

    def __init__(self):
        self.numbers = []

    def on_numbers(self, step, numbers):
        self.numbers.append((step, dict(numbers)))
