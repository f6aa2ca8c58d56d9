"""A look at the leaves (`log.leaves`) against a step, in the char transformer's config.

They take turns on the same batches; the step, which gives up its state, has one of its own.

    python benchmarks/leaves.py [--rounds 15] [--steps 10]
"""

import argparse
import statistics
import time
from pathlib import Path

import jax
from pairs import machine, ratio, table, take_turns

from jtrain.config.resolve import resolve
from jtrain.core.pytree import named_leaves
from jtrain.train.leaf_statistics import LeafStatistics
from jtrain.train.program import set_up

CONFIG = Path(__file__).parent.parent / "configs" / "shakespeare.yaml"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What looking at leaves costs.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    parts = set_up(resolve(CONFIG, ["parallel.kind=single", "steps_per_call=1"]).config)
    step, look, still = parts.compile_step(), LeafStatistics(parts), parts.initial_state()
    state = parts.initial_state()

    def stepping() -> float:
        nonlocal state
        began = time.perf_counter()
        for number in range(given.steps):
            state, metrics = step(state, parts.place(parts.batches().stacked[number]))
            jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / given.steps * 1e3

    def looking() -> float:
        began = time.perf_counter()
        for number in range(given.steps):
            look(number, still)
        return (time.perf_counter() - began) / given.steps * 1e3

    times = take_turns({"step": stepping, "look": looking}, given.rounds)
    print(machine(), f"\n{len(named_leaves(still.params))} leaves; {given}\n")
    print(table(times, "ms", "step"))
    over = ratio(times["look"], times["step"])
    for every in (10, 100):
        print(f"every {every} steps: {over.median / every:.2%} of the time")
    print(f"median of a look: {statistics.median(times['look']):.3g} ms")


if __name__ == "__main__":
    main()
