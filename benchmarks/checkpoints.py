"""Cost of a checkpoint's guarantees: seconds for 200 MB of random float32 in eight leaves.

Sealing reads every file once from the page cache, after it was forced to the disk; verifying reads
it once more; the fingerprint is computed where the leaves lie. The last rows are a whole save: how
long the training thread waits, when the checkpoint is sealed, which is how long it would wait for a
synchronous save, and the one through the other, round by round.

With `--processes` files of that many processes are made, without arrays, 16 of each, and the time
of the first process is measured beside that of a run of one: all others have sealed theirs.

    python benchmarks/checkpoints.py [--mb 400] [--rounds 7] [--directory DIR]
    python benchmarks/checkpoints.py --mb 400 --processes 4
    python benchmarks/checkpoints.py --mb 16 --processes 64
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from pairs import machine, ratio, take_turns

from jtrain.checkpoint import CheckpointManager, layout, seal
from jtrain.parallel import fingerprint

LEAVES = 8
WAITS, SEALED = "save: training waits", "save: until it is sealed"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200, help="1e6 bytes of state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="on the disk that is meant")
    parser.add_argument("--processes", type=int, default=0, help="of a run that is simulated")
    asked = parser.parse_args()
    if asked.processes:
        return first_of_many(asked)
    keys = jax.random.split(jax.random.key(0), LEAVES)
    side = round((asked.mb * 1e6 / 4 / LEAVES) ** 0.5)  # float32, square
    state = {f"w{i}": jax.random.normal(key, (side, side)) for i, key in enumerate(keys)}
    jax.block_until_ready(state)
    print(machine())
    with (
        tempfile.TemporaryDirectory(dir=asked.directory) as place,
        CheckpointManager(Path(place)) as checkpoints,
    ):
        found = measured(checkpoints, state, asked.rounds)
        for name, seconds in found.items():
            print(f"{name:24} {told(seconds)} s")
        waits, saves = found[WAITS], found[SEALED]
        print(f"{'waits / sealed':24} {told([a / b for a, b in zip(waits, saves, strict=True)])}")


def measured(
    checkpoints: CheckpointManager, state: Mapping[str, jax.Array], rounds: int
) -> Mapping[str, list[float]]:
    """Return the seconds of each phase, in each round."""
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
        "verify": timed(lambda: layout.check_valid(directory, last), rounds),
        "list": timed(lambda: layout.list_steps(directory), rounds),
        "fingerprint": timed(lambda: fingerprint.read(fingerprint.start(state)), rounds),
        WAITS: waits[1:],
        SEALED: saves[1:],
    }


FILES = 16  # of a process


def first_of_many(asked: argparse.Namespace) -> None:
    """Print the first process's seconds in a run of many over those of a run of one."""
    print(machine())
    with tempfile.TemporaryDirectory(dir=asked.directory) as place:
        directory = Path(place)
        for processes in (1, asked.processes):  # a checkpoint of each, by its name
            for process in range(processes):
                folder = directory / str(processes) / "state" / f"ocdbt.process_{process}" / "d"
                folder.mkdir(parents=True)
                # Without bytes for the others: their hosts have them.
                size = asked.mb * 10**6 // FILES if process == 0 else 8
                for number in range(FILES):
                    (folder / str(number)).write_bytes(os.urandom(size))
                if process:
                    seal.seal(folder.parent, processes)
        works: Mapping[str, Callable[[int], object]] = {
            "seal": lambda n: seal.seal(directory / str(n), n),
            "verify": lambda n: layout.find_faults(directory, n, full=True, share=(0, n)),
            "list": lambda n: layout.find_faults(directory, n, full=False),
        }
        for name, work in works.items():
            calls = (functools.partial(work, n) for n in (1, asked.processes))
            turns = {f"{i}": functools.partial(once, call) for i, call in enumerate(calls)}
            one, many = take_turns(turns, asked.rounds, warmup=2).values()
            print(f"{name:8} of one {told(one)} s, of many {told(many)} s: {ratio(many, one)}")


def once(work: Callable[[], object]) -> float:
    """Return the seconds of it."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def told(values: list[float]) -> str:
    """Their median, with the least and the most."""
    return f"{statistics.median(values):.3f}  ({min(values):.3f} to {max(values):.3f})"


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round, after one warmup round."""
    work()
    return [once(work) for _ in range(rounds)]


if __name__ == "__main__":
    main()
