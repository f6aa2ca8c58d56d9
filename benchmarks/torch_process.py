"""A step of PyTorch in a process of its own, which may be another Python's."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any


def torch_process(
    python: str, peer: str, setting: dict[str, Any], *, steps: int, cpu: bool
) -> tuple[str, Callable[[], float] | None]:
    """Return PyTorch's versions and a function that measures a step; None, and why, without torch.

    Args:
        python: a Python that has torch.
        peer: the file in benchmarks/peers that takes the steps.
        setting: what the file reads as JSON; the number of threads is added.
        steps: steps a turn.
        cpu: return the milliseconds of processor time in place of those that passed.
    """
    script = str(Path(__file__).parent / "peers" / peer)
    text = json.dumps({**setting, "threads": len(os.sched_getaffinity(0))})
    pipe = subprocess.PIPE
    child = subprocess.Popen([python, script, text], stdin=pipe, stdout=pipe, text=True)
    assert child.stdin
    assert child.stdout
    asks, answers = child.stdin, child.stdout
    versions = answers.readline().strip()
    if not versions:
        return f"PyTorch SKIPPED: {python} has no torch, say --torch PYTHON", None

    def run():
        asks.write(f"{steps}\n")
        asks.flush()
        return float(answers.readline().split()[int(cpu)])

    return versions, run
