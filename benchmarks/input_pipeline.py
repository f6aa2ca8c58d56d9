"""Microseconds for a batch of 128 small rows against numpy's fancy indexing alone.

A row is 784 float32 and a label, of 60,000 in memory. Contestants take turns within one run. A time
is the mean over a turn of many batches, so that what is computed for many at once (the order of the
rows) is in it. Ratios are of turns side by side.

    python benchmarks/input_pipeline.py [--rounds 30] [--batches 500]
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Grain imports JAX

import numpy as np

from jtrain.data import Arrays, GrainRows, InOrder, ReadAhead, Shuffled
from jtrain.data.known_sets import Shakespeare

ROWS, SIZE, GOAL = 60_000, 128, 2.0


def contestants(arrays: dict[str, np.ndarray]) -> dict[str, Callable[[int], object]]:
    """Return the readers of a step's batch by name; the first is the reference."""
    import grain

    image, label = arrays["image"], arrays["label"]
    rng = np.random.default_rng(0)
    taken = [rng.integers(0, ROWS, SIZE) for _ in range(1000)]
    source = Arrays(**arrays)
    shuffled, in_order = Shuffled(source, size=SIZE), InOrder(source, size=SIZE)
    half = Shuffled(source, size=SIZE).shard(0, 2)
    ahead = ReadAhead(Shuffled(source, size=SIZE).__getitem__, start=0, stop=None)
    thread = ReadAhead(Shuffled(source, size=SIZE).__getitem__, start=0, stop=None, slow=0.0)
    elements = grain.MapDataset.range(ROWS).map(lambda i: {"image": image[i], "label": label[i]})
    records = Shuffled(GrainRows(elements), size=SIZE)
    text = Shakespeare(context=64).build().train
    windows = Shuffled(text, size=SIZE)
    orders = Shuffled(Nothing(), size=SIZE)
    text_orders = Shuffled(Nothing(len(text)), size=SIZE)

    return {
        "numpy: images[indices], labels[indices]": lambda k: (
            image[taken[k % 1000]],
            label[taken[k % 1000]],
        ),
        "Shuffled(Arrays)": shuffled.__getitem__,
        "Shuffled(Arrays), read ahead where slow": lambda k: next(ahead),
        "Shuffled(Arrays), always by a thread": lambda k: next(thread),
        "Shuffled(Arrays), one of two processes": half.__getitem__,
        "InOrder(Arrays)": lambda k: in_order[k % len(in_order)],
        "the order alone, 60,000 rows": orders.__getitem__,
        f"the order alone, {len(text):,} rows": text_orders.__getitem__,
        "Shuffled(Windows), context 64, Shakespeare": windows.__getitem__,
        "Shuffled(GrainRows), record by record": records.__getitem__,
    }


class Nothing:
    """A source whose rows are empty: what is left is the order."""

    def __init__(self, rows: int = ROWS):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return {}


def microseconds(read: Callable[[int], object], first: int, batches: int) -> float:
    """Return the mean time of a batch over a turn."""
    start = time.perf_counter()
    for step in range(first, first + batches):
        read(step)
    return (time.perf_counter() - start) / batches * 1e6


def main() -> int:
    """Print the table; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description="Microseconds for a batch of small rows.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batches", type=int, default=500)
    given = parser.parse_args()

    rng = np.random.default_rng(0)
    readers = contestants(
        {
            "image": rng.random((ROWS, 784), np.float32),
            "label": rng.integers(0, 10, ROWS).astype(np.int32),
        }
    )
    times: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(given.rounds + 1):
        for name, read in readers.items():
            batches = given.batches // 50 if "record" in name else given.batches
            spent = microseconds(read, turn * given.batches, batches)
            if turn:  # the first turn warms up
                times[name].append(spent)

    measure = times[next(iter(times))]
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, {versions}")
    print(f"{given.rounds} turns of {given.batches} batches of {SIZE} rows\n")
    print(f"| {'':44} | us a batch | 10 % .. 90 % | over numpy |")
    print(f"|{'-' * 46}|-----------:|-------------:|-----------:|")
    for name, spent in times.items():
        low, *_, high = statistics.quantiles(spent, n=10)
        ratio = statistics.median(a / b for a, b in zip(spent, measure, strict=True))
        middle = statistics.median(spent)
        print(f"| {name:44} | {middle:10.1f} | {low:5.0f} .. {high:4.0f} | {ratio:10.2f} |")
    reached = statistics.median(
        a / b for a, b in zip(times["Shuffled(Arrays)"], measure, strict=True)
    )
    print(f"\ngoal: Shuffled(Arrays) at most {GOAL:g} times numpy; measured {reached:.2f}")
    return int(reached > GOAL)


if __name__ == "__main__":
    sys.exit(main())
