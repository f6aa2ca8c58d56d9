"""Several CPU devices on few cores: no split of a batch makes their collectives deadlock.

Each trial is a run in a process of its own, in the environment of a user: a strategy over 2, 4 or 8
devices, 1, 2 or 4 microbatches, 8, 16 or 24 rows, on one core and on all.
"""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from chaos.trial import Trial

_KINDS = {
    "mirrored": ("parallel.kind=mirrored",),
    "shard_map": ("parallel.kind=mirrored", "parallel.impl=shard_map"),
    "pmap": ("parallel.kind=mirrored", "parallel.impl=pmap"),
    "zero": ("parallel.kind=mirrored", "parallel.zero=2"),
    "fsdp": ("parallel.kind=fsdp",),
    "tensor": ("parallel.kind=sharded", "parallel.tensor=2"),
}
_ROOT = Path(__file__).parent.parent
_CONFIG = _ROOT / "configs" / "shakespeare.yaml"
_TEXT = ("data.kind=text", f"data.path={_ROOT / 'LICENSE'}")  # few rows to evaluate
_SHORT = (*_TEXT, "steps=6", "optimizer.schedule.warmup=2", "evaluate.every=0")
_PATIENCE = 600.0  # seconds on a busy core; XLA aborts after 60


class Split(NamedTuple):
    """A strategy, the split of a batch, and the cores of the process."""

    kind: str
    devices: int
    microbatches: int
    batch: int
    cores: int
    """1, or 0 for all."""

    @property
    def whole(self) -> bool:
        """Whether the rows divide."""
        shares = self.devices // 2 if self.kind == "tensor" else self.devices
        return self.batch % (shares * self.microbatches) == 0

    def settings(self) -> list[str]:
        """Return the overrides of the config."""
        return [
            *_SHORT,
            *_KINDS[self.kind],
            f"parallel.devices={self.devices}",
            f"microbatches={self.microbatches}",
            f"batch={self.batch}",
        ]


SPLITS = [
    split
    for cores in (1, 0)
    for values in itertools.product(_KINDS, (2, 4, 8), (1, 2, 4), (8, 16, 24))
    if (split := Split(*values, cores)).whole
]


def threads(seed: int, folder: Path) -> Trial:
    """Run the split whose number is the seed."""
    split, begun = SPLITS[seed % len(SPLITS)], time.monotonic()
    place = folder / f"threads-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    code, last = run_split(split, place)
    shutil.rmtree(place, ignore_errors=True)
    seconds = time.monotonic() - begun
    return Trial("threads", seed, code == 0, seconds, f"{split} ended with {code}: {last}")


def run_split(split: Split, place: Path) -> tuple[int, str]:
    """Train a few steps in a new process; return its exit code and its last line."""
    few = ",".join(map(str, sorted(os.sched_getaffinity(0))[: split.cores or None]))
    environ = {k: v for k, v in os.environ.items() if k not in {"XLA_FLAGS", "NPROC"}}
    done = subprocess.run(
        ["taskset", "-c", few, sys.executable, "-m", "jtrain", "run", _CONFIG, *split.settings()],
        cwd=place,
        env={**environ, "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    return done.returncode, "".join(done.stdout.splitlines()[-1:])
