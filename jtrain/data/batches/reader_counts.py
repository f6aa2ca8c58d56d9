"""How many processes read the batches of a run, which share out the rows of each."""

from collections.abc import Iterable, Mapping
from typing import Any


def gone_on(stands: Mapping[str, Any], step: int, count: int) -> list[list[int]]:
    """What run.json is to say as `readers` when `count` processes go on after a step.

    A pair for each beginning: the steps after the first number are read by so many processes.

    Args:
        stands: what run.json says so far.
    """
    return [pair for pair in stands.get("readers", []) if pair[0] < step] + [[step, count]]


def readers(stands: Mapping[str, Any], steps: Iterable[int]) -> dict[int, int]:
    """Of each step the number of processes that read its batch, as far as run.json says it."""
    begun = stands.get("readers", [])
    return {
        step: next(count for after, count in reversed(begun) if after < step)
        for step in steps
        if begun and begun[0][0] < step
    }
