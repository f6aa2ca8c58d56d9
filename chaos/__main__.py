"""`python -m chaos`: inject faults into runs, and report the promises that held.

    python -m chaos --full --seed 1 --folder chaos    all rows; resumes if stopped
    python -m chaos --only sigkill --seed 17          repeat one trial
    python -m chaos --board docs/reliability.md --folder chaos

Trials are numbered from the seed on: another seed adds trials to the existing ones. The exit code
is 70 if a trial failed.
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
    """Run the chosen trials; return the exit code."""
    args = _arguments().parse_args(argv)
    with contextlib.suppress(RuntimeError):  # too late: the devices exist
        jax.config.update("jax_num_cpu_devices", DEVICES)  # for trials in this process
    folder = args.folder.resolve()
    rows = {name: ROWS[name] for name in args.only or ROWS}
    results = Results(folder / "results.jsonl")
    failed = False
    if args.board and not (args.full or args.trials or args.failed):
        board.write(args.board, ROWS, results, folder)
        return DONE
    if args.full:
        chosen = pending(rows, results, folder, args.seed, args.trials)
    elif args.failed:
        chosen = failures(rows, results)
    else:
        seeds = range(args.seed, args.seed + (args.trials or 1))
        chosen = ((name, seed) for seed in seeds for name in rows)
    for name, seed in chosen:
        trial = run_trial(name, ROWS[name], seed, folder)
        failed |= not trial.passed
        sys.stdout.write(f"{trial}\n")
        sys.stdout.flush()
        if args.full or args.failed:
            results.append(trial)
            if args.board:
                board.write(args.board, ROWS, results, folder)
    return FAULT if failed else DONE


def run_trial(name: str, row: Row, seed: int, folder: Path) -> Trial:
    """Run a trial; an exception counts as a failure."""
    trial_folder, began = folder / name, time.monotonic()
    trial_folder.mkdir(parents=True, exist_ok=True)
    try:
        return row.trial(seed, trial_folder)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return Trial(name, seed, False, time.monotonic() - began, detail)


def pending(
    rows: Mapping[str, Row], results: Results, folder: Path, first: int, most: int = 0
) -> Iterator[tuple[str, int]]:
    """Yield the remaining trials of the full run, from the row with the least progress first."""
    left = {}
    for name, row in rows.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        count = most or row.count(folder / name)
        finished = results.of(name).keys()
        seeds = [seed for seed in range(first, first + count) if seed not in finished]
        left[name] = count, seeds
    while any(seeds for _, seeds in left.values()):
        name = max(left, key=lambda name: len(left[name][1]) / left[name][0])
        yield name, left[name][1].pop(0)


def failures(rows: Mapping[str, Row], results: Results) -> Iterator[tuple[str, int]]:
    """Yield the seeds whose last trial failed."""
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
    add("--full", action="store_true", help="the number of trials in the table, saved in FOLDER")
    add("--failed", action="store_true", help="repeat the trials whose last result was a failure")
    add("--only", action="append", choices=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    add("--seed", type=int, default=1, help="seed of the first trial (1)")
    add("--trials", type=int, default=0, help="trials of each row; default: as in the table")
    add("--folder", type=Path, default=Path("chaos"), help="working directory (./chaos)")
    add("--board", type=Path, metavar="PAGE", help="the page whose table is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
