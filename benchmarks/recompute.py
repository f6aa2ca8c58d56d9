"""Cost of computing steps twice (`checks.recompute`) in `configs/shakespeare.yaml`.

In turns, some steps as they are, and as many of which each `--every`-th is computed twice and
compared. What one such step adds, in steps, divided by 200 is what `checks.recompute=200` adds.

    python benchmarks/recompute.py [--rounds 30] [--steps 10] [--every 5] [--cpu]
"""

import argparse
import time

from guard import Turn, parts_of
from pairs import machine, ratio, table, take_turns

from jtrain.train.hooks.recompute_check import RecomputeCheck

SPARSE, GOAL = 200, 0.006


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps a turn, a multiple of --every")
    parser.add_argument("--every", type=int, default=5, help="steps of which one is taken twice")
    parser.add_argument("--cpu", action="store_true", help="time of the process, not of the wall")
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    # In the middle of its steps, and settled within its turn: else the next turn pays for the last.
    parts, checks = parts_of(), RecomputeCheck(every=given.every, start=given.every // 2)
    program = parts.compile_step()
    once = Turn(parts, program, given.steps, clock=clock)
    twice = Turn(parts, checks.wrap(program), given.steps, clock=clock)

    def settled() -> float:
        spent, began = twice(), clock()
        checks.compare_all()
        return spent + (clock() - began) / given.steps * 1e3

    runs = {"as they are": once, f"each {given.every}. twice": settled}
    times = take_turns(runs, given.rounds, warmup=3)
    print(machine(), end="\n\n")
    print(table(times, "ms a step", "as they are"))
    over = ratio(times[f"each {given.every}. twice"], times["as they are"])
    one, low, high = ((x - 1) * given.every for x in (over.median, over.low, over.high))
    print(f"\na step that is taken twice adds {one:.2f} steps ({low:.2f} .. {high:.2f})")
    sparse = one / SPARSE
    print(f"each {SPARSE}. of them: {sparse:.2%}; goal {GOAL:.1%}: ", end="")
    print("met" if sparse <= GOAL else "missed")


if __name__ == "__main__":
    main()
