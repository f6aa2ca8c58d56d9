"""Turns of ours and PyTorch's step within one part, and their rows."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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


class Peer:
    """A step in a process of its own, which compiles while this one does.

    The process writes a line when its step is compiled, and the seconds of a step for each number
    of steps that it reads.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdin=pipe, stdout=pipe, text=True
        )

    def wait(self) -> str:
        """Return its first line; empty if it ended before."""
        assert self._child.stdout
        return self._child.stdout.readline().strip()

    def turn(self, steps: int) -> float:
        """Return the seconds of one of some steps."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(f"{steps}\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def end(self) -> None:
        """Free its memory."""
        self._child.kill()
        self._child.wait()


class TorchPeer(Peer):
    """PyTorch's step."""

    def __init__(self, python: str, setting: dict[str, Any]) -> None:
        self.python = python
        script = str(Path(__file__).parent / "torch_peer.py")
        super().__init__([python, script, json.dumps(setting)])


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
    runs: dict[str, Callable[[], float]] = {"jtrain": lambda: ours(steps)}
    note = torch.wait()
    if note:
        runs["PyTorch"] = lambda: torch.turn(steps)
    else:
        advice = "pip install torch, or --torch PYTHON"
        note = f"PYTORCH SKIPPED: {torch.python} cannot run it; {advice}"
    times = take_turns(runs, turns, warmup=1 if sizes == "rehearsal" else 2)
    rows = []
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rows.append({"what": name, "value": work / middle, "unit": f"{unit}/s"})
        if flops:
            rows.append({"what": f"{name}, MFU", "value": 100 * flops / middle, "unit": "%"})
    if "PyTorch" in times:
        over = ratio(times["jtrain"], times["PyTorch"])
        rows.append({"what": "jtrain's time over PyTorch's", "value": str(over), "unit": ""})
    return {"rows": rows, "notes": [note]}
