"""Milliseconds of a step whose rows are split over 1, 2, 4 devices or 2 processes of this machine.

nanoGPT's CPU setting: 4 layers, 4 heads, width 128, context 64, batch 12, 65 tokens, AdamW. Each
contestant is a process of its own, or two; they take turns, the others being idle meanwhile. With
a Python that has TensorFlow, MirroredStrategy over as many logical CPUs takes turns with them.

    python benchmarks/data_parallel.py [--rounds 15] [--steps 8] [--tensorflow PYTHON]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pairs import machine, ratio, table, take_turns

from jtrain.distributed.launcher.supervise import worker_environment
from jtrain.distributed.port import free_port

PEERS = Path(__file__).parent / "peers"
SIZES = {"vocab": 65, "context": 64, "layers": 4, "heads": 4, "width": 128}
BATCH = 12
ONE = "1 device"
SPLITS: dict[str, tuple[dict[str, Any], int, int]] = {  # parallel, processes, devices of each
    ONE: ({}, 1, 1),
    "2 devices": ({"kind": "mirrored"}, 1, 2),
    "2 devices, shard_map": ({"kind": "mirrored", "impl": "shard_map"}, 1, 2),
    "4 devices": ({"kind": "mirrored"}, 1, 4),
    "4 devices, shard_map": ({"kind": "mirrored", "impl": "shard_map"}, 1, 4),
    "2 processes": ({"kind": "mirrored"}, 2, 1),
    "2 processes, shard_map": ({"kind": "mirrored", "impl": "shard_map"}, 2, 1),
}


def main() -> None:
    """Print a table, each layout over one device."""
    parser = argparse.ArgumentParser(description="Data parallel on one machine.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps a turn")
    parser.add_argument(
        "--tensorflow", metavar="PYTHON", default="", help="one that has TensorFlow"
    )
    asked = parser.parse_args()
    print(machine(), flush=True)
    with contextlib.ExitStack() as stack:
        contestants = {
            name: stack.enter_context(served(split(*how), asked.steps))
            for name, how in SPLITS.items()
        }
        for count in (1, 2, 4) if asked.tensorflow else ():
            command = [asked.tensorflow, str(PEERS / "mirrored_tensorflow.py")]
            given = json.dumps({"sizes": SIZES, "batch": BATCH, "devices": count})
            contestants[f"TensorFlow Mirrored, {count}"] = stack.enter_context(
                served([([*command, given], dict(os.environ))], asked.steps)
            )
        times = take_turns(contestants, asked.rounds, warmup=2)
    print(table(times, "ms a step", ONE))
    print(f"\none device over two: {ratio(times[ONE], times['2 devices'])}; wanted: at least 1.15")


def split(
    parallel: dict[str, Any], processes: int, devices: int
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of the processes, and their environments."""
    script = str(PEERS / "split_transformer.py")
    given = json.dumps({"sizes": SIZES, "batch": BATCH, "parallel": parallel})
    where, alone = f"127.0.0.1:{free_port()}", {"JAX_NUM_CPU_DEVICES": f"{devices}"}
    return [
        (
            [sys.executable, script, given],
            {"JAX_PLATFORMS": "cpu", **os.environ, **alone}
            if processes == 1
            else worker_environment(os.environ, where, index, processes, devices),
        )
        for index in range(processes)
    ]


@contextlib.contextmanager
def served(commands: Sequence[tuple[list[str], dict[str, str]]], steps: int):
    """Return a function that measures milliseconds of one of `steps` steps of these processes."""
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
            )
            for command, env in commands
        ]
        first = children[0]
        assert first.stdout
        try:
            print("ready:", first.stdout.readline().strip(), flush=True)
            yield _asking(children, steps)
        finally:
            for child in children:
                child.kill()


def _asking(children: Sequence[subprocess.Popen], steps: int) -> Callable[[], float]:
    def run() -> float:
        for child in children:
            assert child.stdin
            child.stdin.write(f"{steps}\n")
            child.stdin.flush()
        assert children[0].stdout
        return float(children[0].stdout.readline())

    return run


if __name__ == "__main__":
    main()
