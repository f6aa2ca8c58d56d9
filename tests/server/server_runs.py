"""Runs on parameter servers whose processes are threads of the test, and runs on one device."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from quick_study import config_of

from benchmarks.server_threads import thread_cluster
from jtrain.core.loop import Hook, LoopResult, train_loop
from jtrain.server.coordinator import Coordinator
from jtrain.server.plan import Plan
from jtrain.server.server_loop import take_steps
from jtrain.train.program import Program, set_up

SERVER = "parallel={kind: server, workers: %d, shards: %d, timeout: 20, mode: %s}"


def server_setup(path: Path, mode: str, *settings: str, workers=2, shards=1) -> Program:
    return set_up(config_of(path, [SERVER % (workers, shards, mode), *settings]))


def train_on_servers(
    program: Program,
    *,
    hooks: Sequence[Hook] = (),
    meddle: Callable[[Coordinator, Any], None] | None = None,
    log: Callable[[str], None] = print,
    environ=None,
) -> LoopResult:
    """Train in threads."""
    state = program.initial_state()
    with thread_cluster(Plan(program), log=log, environ=environ) as (coordinator, supervisor):
        coordinator.start(0, state)
        if meddle is not None:
            meddle(coordinator, supervisor)
        stop = program.resolved.config.steps
        return take_steps(coordinator, state, start=0, stop=stop, hooks=hooks)


def train_on_one_device(path: Path, *settings: str, hooks: Sequence[Hook] = ()) -> LoopResult:
    """Train with the loop of one program."""
    program = set_up(config_of(path, ("steps_per_call=1", *settings)))
    batches = (
        program.place(program.batches().train[step])
        for step in range(program.resolved.config.steps)
    )
    step, stop = program.compile_step(), program.resolved.config.steps
    return train_loop(step, program.initial_state(), batches, start=0, stop=stop, hooks=hooks)


def host(tree):
    return jax.tree.map(np.asarray, tree)


class Losses(Hook):
    """Hook that keeps the numbers of each step."""

    def __init__(self):
        self.numbers = []

    def on_numbers(self, step, numbers):
        self.numbers.append((step, dict(numbers)))


class KillAt(Losses):
    """Hook that takes a process away after a step."""

    def __init__(self, step, role, index):
        super().__init__()
        self.step, self.who = step, (role, index)
        self.supervisor: Any = None

    def meddle(self, coordinator, supervisor):
        self.supervisor = supervisor

    def on_numbers(self, step, numbers):
        super().on_numbers(step, numbers)
        if step == self.step:
            self.supervisor.processes[self.who].kill()
            self.supervisor.processes[self.who].end = "SIGKILL"
