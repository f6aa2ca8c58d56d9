"""Turns of ours and PyTorch's step within one part, and their rows."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from pairs import ratio, take_turns
from sizes import TURNS

Turn = Callable[[int], float]  # steps -> seconds of one


def clocked(take: Callable[[int], Any]) -> Turn:
    """Return the turns of a function that takes the step of a number."""
    done = [0]

    def turn(steps: int) -> float:
        start = time.perf_counter()
        value = None
        for _ in range(steps):
            value = take(done[0])
            done[0] += 1
        jax.block_until_ready(value)
        return (time.perf_counter() - start) / steps

    return turn


class TorchPeer:
    """PyTorch's step in a process of its own, which compiles while ours does."""

    def __init__(self, python: str, setting: dict[str, Any]) -> None:
        script = str(Path(__file__).parent / "torch_peer.py")
        pipe = subprocess.PIPE
        self._python = python
        self._child = subprocess.Popen(
            [python, script, json.dumps(setting)], stdin=pipe, stdout=pipe, text=True
        )

    def wait(self) -> tuple[str, Turn | None]:
        """Return PyTorch's versions and turns; without torch a loud note and None."""
        assert self._child.stdin
        assert self._child.stdout
        asks, answers = self._child.stdin, self._child.stdout
        versions = answers.readline().strip()
        if not versions:
            advice = "pip install torch, or --torch PYTHON"
            return f"PYTORCH SKIPPED: {self._python} cannot run it; {advice}", None

        def turn(steps: int) -> float:
            asks.write(f"{steps}\n")
            asks.flush()
            return float(answers.readline())

        return versions, turn


def compare(
    ours: Turn, sizes: str, torch: TorchPeer, *, work: float, unit: str, flops: float
) -> dict[str, Any]:
    """Return the rows of steps in turns: work a second, ratio and MFU.

    Args:
        ours: our turns.
        sizes: of the turns.
        torch: PyTorch's process.
        work: tokens or images of a step.
        unit: their name.
        flops: the model's operations in a step over the peak of the GPU; 0: not known.
    """
    turns, steps = TURNS[sizes]
    note, theirs = torch.wait()
    runs: dict[str, Callable[[], float]] = {"jtrain": lambda: ours(steps)}
    if theirs is not None:
        runs["PyTorch"] = lambda: theirs(steps)
    times = take_turns(runs, turns, warmup=1 if sizes == "rehearsal" else 2)
    rows = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rows.append({"what": name, "value": work / middle, "unit": f"{unit}/s"})
        if flops:
            rows.append({"what": f"{name}, MFU", "value": 100 * flops / middle, "unit": "%"})
    if theirs is not None:
        over = ratio(times["jtrain"], times["PyTorch"])
        rows.append({"what": "jtrain's time over PyTorch's", "value": str(over), "unit": ""})
    return {"rows": rows, "notes": [note]}
