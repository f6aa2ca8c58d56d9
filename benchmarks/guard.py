"""Cost of the guard in the program of a step of `configs/shakespeare.yaml`.

Bare: the same step that takes every update. Over it: the step as it is, which takes an update only
if it is finite. What the host does for each step is in loop_overhead.py. `--cpu` counts the time of
all threads of the process instead of that on the wall: what a machine that does other things
besides can still tell.

    python benchmarks/guard.py [--rounds 60] [--steps 10] [--cpu]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jax
import optax
from pairs import machine, ratio, table, take_turns

import jtrain as jt
from jtrain.config.resolve import resolve
from jtrain.core.finite import UpdateResult
from jtrain.core.pytree import norm
from jtrain.train.program import Program, set_up

GOAL = 1.01


def parts_of(*settings: str) -> Program:
    """Build the character transformer on one device, without an end."""
    path = Path(__file__).parent.parent / "configs" / "shakespeare.yaml"
    settings = ("parallel={kind: single}", "steps=100000000", *settings)
    return set_up(resolve(path, settings).config)


def always(finite, update, grads, opt_state, params, before, extra, **known) -> UpdateResult:
    """`jtrain.core.finite.update_if` without the if."""
    del finite, before
    updates, opt_state = update(grads, opt_state, params, **known)
    taken = optax.apply_updates(params, updates)
    return UpdateResult(taken, opt_state, extra, norm(updates))


class Turn:
    """A part of a run, at each call; gives the milliseconds of a step."""

    def __init__(
        self,
        parts: Program,
        step: Callable,
        steps: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.step, self.state, self.steps, self.done = step, parts.initial_state(), steps, 0
        self.clock = clock
        self._parts = parts

    def feed(self) -> Iterator:
        """Yield the batches from the current step."""
        for step in range(self.done, self.done + self.steps):
            yield self._parts.place(self._parts.batches().read(step))

    def __call__(self) -> float:
        """Take some steps."""
        began = self.clock()
        stop = self.done + self.steps
        ended = jt.train_loop(self.step, self.state, self.feed(), start=self.done, stop=stop)
        self.state, self.done = jax.block_until_ready(ended.state), stop
        return (self.clock() - began) / self.steps * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="steps a turn")
    parser.add_argument("--cpu", action="store_true", help="time of the process, not of the wall")
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    parts = parts_of()
    with mock.patch("jtrain.core.step.update_if", always):
        bare = parts.compile_step()
    runs = {
        "bare": Turn(parts, bare, given.steps, clock=clock),
        "the step as it is": Turn(parts, parts.compile_step(), given.steps, clock=clock),
    }
    times = take_turns(runs, given.rounds, warmup=3)
    print(machine(), end="\n\n")
    print(table(times, "ms a step", "bare"))
    over = ratio(times["the step as it is"], times["bare"])
    print(f"\ngoal {GOAL}: {'met' if over.median <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
