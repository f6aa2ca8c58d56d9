"""One of several processes that train under layouts in turn: CONFIG STOP_AT RUN ... Not a test.

Each RUN is `NAME SETTING ...`, of the same tiny transformer, in runs/NAME; it stops after step
STOP_AT unless that is 0. Which rows the first of them reads is written for each process.
"""

import os
import sys
from pathlib import Path

import numpy as np
from quick_study import At, run_quietly

import jtrain as jt
from jtrain.config.resolve import resolve
from jtrain.data.text.corpora import RandomTokens

TINY = (
    *("batch=16", "steps=4", "microbatches=1", "log.every=1", "checkpoint.every=0"),
    *("evaluate.batch=16", "evaluate.every=2", "data.context=8", "data.vocab=64", "data.rows=64"),
    *("model.preset=none", "model.vocab=0", "model.context=8", "model.layers=1", "model.heads=4"),
    *("model.width=32", "model.attention=xla", "optimizer={kind: sgd, lr: 0.1}"),
    "precision.kind=f32",
)


PLAIN = RandomTokens.__getitem__


def watched(path: Path) -> None:
    """Notes which rows are read."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        with path.open("a") as file:
            file.write(" ".join(map(str, indices.tolist())) + "\n")
        return PLAIN(self, indices)

    RandomTokens.__getitem__ = read


def train(config: Path, settings: list[str], stop: int) -> None:
    hooks = [At(stop, lambda: jt.Stop("as it was told"))] if stop else []
    run_quietly(resolve(config, [*TINY, *settings]).config, hooks)


def main(config: str, stop: str, *runs: str) -> None:
    for number, run in enumerate(runs):
        if number == 1:
            RandomTokens.__getitem__ = PLAIN
        name, *settings = run.split()
        train(Path(config), [f"name={name}", *settings], int(stop))


if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    watched(Path("runs") / f"read-{os.environ['JTRAIN_PROCESS']}.txt")
    main(*sys.argv[1:])
