"""Rows a second on a parameter server and two workers, beside TensorFlow's strategy of that name.

The MLP of configs/digits.yaml (64, 512, 256, 10 units, dropout), batches of 128 rows, SGD, one
server, two workers, asynchronous. Each side is a coordinator and three processes of this machine;
they take turns, the other being idle meanwhile. Needs the digits and a Python with TensorFlow.

    python benchmarks/parameter_server.py --tensorflow PYTHON [--rounds 15] [--steps 60]
"""

import argparse
import contextlib
import json
import os
import sys

from data_parallel import PEERS, served
from pairs import machine, ratio, table, take_turns

BATCH, WIDTHS, DROPOUT, RATE = 128, (512, 256), 0.2, 0.05
OURS, THEIRS = "jtrain, async", "TensorFlow, ParameterServerStrategy"
SETTINGS = [
    "steps=100000",
    "steps_per_call=1",
    f"batch={BATCH}",
    f"model.widths={list(WIDTHS)}",
    f"model.dropout={DROPOUT}",
    f"optimizer={{kind: sgd, lr: {RATE}}}",
    "evaluate.every=0",
    "checkpoint.every=0",
    "parallel={kind: server, workers: 2, shards: 1, mode: {kind: async}, snapshot_every: 100000}",
]


def main() -> None:
    """Print a table, and TensorFlow's time over jtrain's."""
    parser = argparse.ArgumentParser(description="Parameter servers on one machine.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60, help="steps a turn")
    parser.add_argument("--tensorflow", metavar="PYTHON", required=True)
    asked = parser.parse_args()
    print(machine(), flush=True)
    given = {"batch": BATCH, "widths": WIDTHS, "dropout": DROPOUT, "lr": RATE, "workers": 2}
    environ = {"JAX_PLATFORMS": "cpu", **os.environ}
    ours = [sys.executable, str(PEERS / "parameter_server_jtrain.py"), json.dumps(SETTINGS)]
    theirs = [asked.tensorflow, str(PEERS / "parameter_server_tensorflow.py"), json.dumps(given)]
    with contextlib.ExitStack() as stack:
        contestants = {
            name: stack.enter_context(served([(command, environ)], asked.steps))
            for name, command in {OURS: ours, THEIRS: theirs}.items()
        }
        times = take_turns(contestants, asked.rounds, warmup=3)
    print(table(times, "ms a step", OURS))
    for name, spent in times.items():
        middle = sorted(spent)[len(spent) // 2]
        print(f"{name}: {BATCH / middle * 1e3:.0f} rows/s")
    print(f"\nTensorFlow over jtrain: {ratio(times[THEIRS], times[OURS])}; wanted: above 1")


if __name__ == "__main__":
    main()
