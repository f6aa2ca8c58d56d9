"""Cost of what measures a run: heartbeat, ledger, speed with quantiles and memory, log, metrics.

One run, whose turns call all its hooks, or all but those that measure; the same compiled step. The
transformer is configs/shakespeare.yaml's network with a line of log each 10 steps. The tiny MLP
gives the microseconds a step, with a line each 1000 steps.

    python benchmarks/measuring.py [--rounds 40] [mlp | transformer ...]
"""

import argparse
import contextlib
import dataclasses
import statistics

from loop_overhead import Characters, Mlp, Ours, config
from pairs import machine, ratio, table, take_turns

from jtrain.config.top import LogConfig
from jtrain.core.loop import Hook
from jtrain.train.hooks import LogHook, MetricsFile, Speed
from jtrain.train.hooks.function_hooks import HeartbeatHook
from jtrain.train.hooks.speed import TimeRows

MEASURES = (HeartbeatHook, TimeRows, Speed, LogHook, MetricsFile)


class Turns:
    """Turns of a run with some of its hooks."""

    def __init__(self, run: Ours, hooks: list[Hook]):
        self._run, self._hooks = run, hooks

    def __call__(self) -> float:
        """Return the microseconds a step of this turn."""
        self._run.hooks = self._hooks
        return self._run()


def main() -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("workloads", nargs="*", default=["mlp", "transformer"])
    given = parser.parse_args()
    print(machine())
    for name in given.workloads:
        with contextlib.ExitStack() as stack:
            if name == "mlp":
                run = Ours(config(Mlp, 32), 1000, stack)
            else:
                values = dataclasses.replace(config(Characters, 16), log=LogConfig(every=10))
                run = Ours(values, 20, stack)
            everything = list(run.hooks)
            without = [hook for hook in everything if not isinstance(hook, MEASURES)]
            contestants = {"without": Turns(run, without), "with": Turns(run, everything)}
            times = take_turns(contestants, given.rounds)
        print(f"\n{name}: {len(everything) - len(without)} hooks measure\n")
        print(table(times, "us", "without"))
        gaps = [a - b for a, b in zip(times["with"], times["without"], strict=True)]
        print(f"\ndifference: {statistics.median(gaps):.1f} us a step (median of pairs)")
        print(f"ratio: {ratio(times['with'], times['without'])}")


if __name__ == "__main__":
    main()
