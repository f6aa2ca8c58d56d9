"""Reader counts: the processes that shared the batches of a run, step by step."""

from collections.abc import Iterable, Mapping
from typing import Any


def add_readers(status: Mapping[str, Any], step: int, count: int) -> list[list[int]]:
    """Return `readers` of run.json when `count` processes resume after a step.

    One pair for each start: a step, and the number of processes that read the steps after it.

    Args:
        status: the current content of run.json.
    """
    return [pair for pair in status.get("readers", []) if pair[0] < step] + [[step, count]]


def count_readers(status: Mapping[str, Any], steps: Iterable[int]) -> dict[int, int]:
    """Return the number of processes that read each step's batch, where run.json has it."""
    starts = status.get("readers", [])
    return {
        step: next(count for after, count in reversed(starts) if after < step)
        for step in steps
        if starts and starts[0][0] < step
    }
