"""`python -m chaos`: hurts runs, and says what held.

    python -m chaos --full --seed 1 --folder chaos    all rows; goes on if stopped
    python -m chaos --only sigkill --seed 17          one trial again
    python -m chaos --board docs/reliability.md --folder chaos

Trials are numbered from the seed on: another seed adds to what there is. The exit code is 70 if
one failed.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from chaos import board
from chaos.flips import DEVICES
from chaos.results import Results
from chaos.rows import ROWS, Row
from chaos.trial import Trial
from jtrain.errors import DONE, FAULT


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    typed = _arguments().parse_args(argv)
    with contextlib.suppress(RuntimeError):  # too late: there are as many as there are
        jax.config.update("jax_num_cpu_devices", DEVICES)  # of the trials made in this process
    folder = typed.folder.resolve()
    rows = {name: ROWS[name] for name in typed.only or ROWS}
    results = Results(folder / "results.jsonl")
    failed = False
    if typed.board and not (typed.full or typed.trials or typed.failed):
        board.write(typed.board, ROWS, results, folder)
        return DONE
    if typed.full:
        chosen = to_do(rows, results, folder, typed.seed, typed.trials)
    elif typed.failed:
        chosen = failures(rows, results)
    else:
        seeds = range(typed.seed, typed.seed + (typed.trials or 1))
        chosen = ((name, seed) for seed in seeds for name in rows)
    for name, seed in chosen:
        trial = tried(name, ROWS[name], seed, folder)
        failed |= not trial.passed
        sys.stdout.write(f"{trial}\n")
        sys.stdout.flush()
        if typed.full or typed.failed:
            results.append(trial)
            if typed.board:
                board.write(typed.board, ROWS, results, folder)
    return FAULT if failed else DONE


def tried(name: str, row: Row, seed: int, folder: Path) -> Trial:
    """A trial; one that cannot be made has failed."""
    place, began = folder / name, time.monotonic()
    place.mkdir(parents=True, exist_ok=True)
    try:
        return row.trial(seed, place)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return Trial(name, seed, False, time.monotonic() - began, detail)


def to_do(
    rows: Mapping[str, Row], results: Results, folder: Path, first: int, most: int = 0
) -> Iterator[tuple[str, int]]:
    """What is left of the full run, each time of the row that is least far."""
    left = {}
    for name, row in rows.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        count = most or row.count(folder / name)
        known = results.of(name).keys()
        seeds = [seed for seed in range(first, first + count) if seed not in known]
        left[name] = count, seeds
    while any(seeds for _, seeds in left.values()):
        name = max(left, key=lambda name: len(left[name][1]) / left[name][0])
        yield name, left[name][1].pop(0)


def failures(rows: Mapping[str, Row], results: Results) -> Iterator[tuple[str, int]]:
    """The seeds whose last trial failed."""
    for name in rows:
        for seed, found in sorted(results.of(name).items()):
            if not found[-1].trial.passed:
                yield name, seed


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--full", action="store_true", help="every row as often as the table asks, kept in FOLDER")
    add(
        "--failed", action="store_true", help="the trials once more whose last result was a failure"
    )
    add("--only", action="append", choices=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    add("--seed", type=int, default=1, help="of the first trial (1)")
    add("--trials", type=int, default=0, help="of each row, where not the table says how many")
    add("--folder", type=Path, default=Path("chaos"), help="where it is done and kept (./chaos)")
    add("--board", type=Path, metavar="PAGE", help="the page whose table is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
