"""Contestants take turns within one run, so that a machine whose speed drifts is fair to all."""

import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

PACKAGES = ("jax", "optax", "flax", "numpy")


class Ratio(NamedTuple):
    """The median of the ratios of turns side by side, and where 95 % of its resamples lie."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} .. {self.high:.3f})"


def take_turns(
    contestants: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return each contestant's result at each turn, without the first `warmup` turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + warmup):
        for name, contestant in contestants.items():
            measured = contestant()
            if turn >= warmup:
                times[name].append(measured)
    return times


def ratio(times: Sequence[float], others: Sequence[float], resamples: int = 2000) -> Ratio:
    """`times` over `others`, turn by turn; the interval by the bootstrap (Efron 1979)."""
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples)
    )
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Ratio(statistics.median(ratios), low, high)


def machine() -> str:
    """Describe the machine in one line: processor, cores, system and versions."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def table(times: Mapping[str, Sequence[float]], unit: str, against: str) -> str:
    """Markdown: the median and the spread of each, and its ratio to `against`."""
    rows = [f"| | {unit} | 10 % .. 90 % | over {against} |", "|---|---:|---:|---:|"]
    for name, spent in times.items():
        low, *_, high = statistics.quantiles(spent, n=10)
        middle = statistics.median(spent)
        rows.append(
            f"| {name} | {middle:.3g} | {low:.3g} .. {high:.3g} | {ratio(spent, times[against])} |"
        )
    return "\n".join(rows)
