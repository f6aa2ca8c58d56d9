"""Cost of guard, step recorder and heartbeat for a step of `configs/shakespeare.yaml`.

Bare: the same step that takes every update, in the same loop with no hooks. Over it, one after the
other: the step as it is, which takes an update only if it is finite; with the hooks that each run
has (a heartbeat, the record of each step, the look at what was skipped); and with `guard:
{kind: rollback}` and both spikes watched, which reads the numbers of each step.

A second table has the microseconds of the hooks alone, of the same loop around a step that computes
nothing. `--cpu` counts the time of all threads of the process instead of that on the wall: what a
machine that does other things besides can still tell.

    python benchmarks/guard.py [--rounds 60] [--steps 10] [--cpu]
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import jax
import optax
from jtrain.train.bad_step_policy import BadStepPolicy
from pairs import machine, ratio, table, take_turns

import jtrain as jt
from jtrain.config.resolve import resolve
from jtrain.core.finite import UpdateResult
from jtrain.core.pytree import norm
from jtrain.train.hooks.function_hooks import HeartbeatHook
from jtrain.train.hooks.step_record import StepRecorder
from jtrain.train.program import Program, set_up
from jtrain.train.run_dir import RunDir

ROLLBACK = "guard={kind: rollback, spike: {loss: 3, grad_norm: 10}}"
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
        program: Callable,
        steps: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.program, self.state, self.steps, self.done = program, parts.initial_state(), steps, 0
        self.clock = clock
        self.hooks: Sequence[jt.Hook] = ()
        self.record: StepRecorder | None = None
        self._parts = parts

    def watched(self, stack: contextlib.ExitStack) -> "Turn":
        """Take steps with the hooks of a run."""
        directory = RunDir(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        guarded = stack.enter_context(BadStepPolicy(self._parts, directory))
        self.record = StepRecorder(directory.steps)
        stack.callback(self.record.close)
        guards = guarded.hooks(self.state, every=self._parts.config.log.every, log=print)
        self.hooks = [HeartbeatHook(), self.record, *guards]
        return self

    def feed(self) -> Iterator:
        """Yield the batches from the current step."""
        for step in range(self.done, self.done + self.steps):
            batch = self._parts.calls[step]
            if self.record:
                self.record.observe(step, [batch])
            yield self._parts.place(batch)

    def __call__(self) -> float:
        """Take some steps."""
        began = self.clock()
        stop = self.done + self.steps
        ended = jt.train_loop(
            self.program, self.state, self.feed(), start=self.done, stop=stop, hooks=self.hooks
        )
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
    parts, judged = parts_of(), parts_of(ROLLBACK)
    with mock.patch("jtrain.core.step.update_if", always):
        bare = parts.compile_step()
    program = parts.compile_step()
    done = program(parts.initial_state(), parts.place(parts.batches().stacked[0]))[1]
    nothing = lambda state, batch: (state, done)
    with contextlib.ExitStack() as stack:
        turn = lambda parts, program: Turn(parts, program, given.steps, clock=clock)
        runs = {
            "bare": turn(parts, bare),
            "the step as it is": turn(parts, program),
            "with the hooks of each run": turn(parts, program).watched(stack),
            "with rollback and spikes": turn(judged, program).watched(stack),
        }
        times = take_turns(runs, given.rounds, warmup=3)
        turn = lambda parts: Turn(parts, nothing, 500, clock=clock)
        runs = {
            "no hooks": turn(parts),
            "those of each run": turn(parts).watched(stack),
            "with rollback and spikes": turn(judged).watched(stack),
        }
        alone = take_turns(runs, given.rounds // 2, warmup=1)
    print(machine(), end="\n\n")
    print(table(times, "ms a step", "bare"))
    print(
        f"\n{table({n: [1e3 * x for x in t] for n, t in alone.items()}, 'us a step', 'no hooks')}"
    )
    over = ratio(times["with the hooks of each run"], times["bare"])
    print(f"\ngoal {GOAL}: {'met' if over.median <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
