"""What a checkpoint's promises cost: seconds for 200 MB of random float32 in eight leaves.

Sealing reads every file once from the page cache, after it was forced to the disk; verifying reads
it once more; the fingerprint is computed where the leaves lie. The last rows are a whole save: how
long the training thread waits, and when the checkpoint is sealed.

    python benchmarks/checkpoints.py [--rounds 7] [--directory DIR]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from pairs import machine

from jtrain.checkpoint import Checkpoints, fingerprint, folder, seal

LEAVES, SIDE = 8, 2500  # 8 x 2500 x 2500 x 4 bytes = 200 MB


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant")
    asked = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), LEAVES)
    state = {f"w{i}": jax.random.normal(key, (SIDE, SIDE)) for i, key in enumerate(keys)}
    jax.block_until_ready(state)
    print(machine())
    with (
        tempfile.TemporaryDirectory(dir=asked.directory) as place,
        Checkpoints(Path(place)) as checkpoints,
    ):
        for name, seconds in measured(checkpoints, state, asked.rounds).items():
            low, high = min(seconds), max(seconds)
            print(f"{name:24} {statistics.median(seconds):.3f} s  ({low:.3f} to {high:.3f})")


def measured(
    checkpoints: Checkpoints, state: Mapping[str, jax.Array], rounds: int
) -> Mapping[str, list[float]]:
    """Seconds of each thing, in each round."""
    waits, saves = [], []
    for step in range(rounds + 1):
        start = time.perf_counter()
        checkpoints.save(step, dict(state), {})
        waits.append(time.perf_counter() - start)
        checkpoints.wait()
        saves.append(time.perf_counter() - start)
    directory, last = checkpoints.directory, rounds
    return {
        "seal": timed(lambda: seal.seal(directory / str(last), last), rounds),
        "verify": timed(lambda: folder.check(directory, last), rounds),
        "list": timed(lambda: folder.steps(directory), rounds),
        "fingerprint": timed(lambda: fingerprint.read(fingerprint.begin(state)), rounds),
        "save: training waits": waits[1:],
        "save: until it is sealed": saves[1:],
    }


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round, after one that is not counted."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
