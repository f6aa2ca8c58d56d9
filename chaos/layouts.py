"""A run that goes on under another layout: the same bits, the same batches, the same losses.

A layout is how the state is split (by rows of the batch, the state itself, or its `hidden` dims),
over how many devices, in how many processes.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from chaos.laid import AGAIN, RUN, SEEN, STEPS
from chaos.trial import Trial
from jtrain.checkpoint import fingerprint
from jtrain.checkpoint.inspect import read_arrays
from jtrain.checkpoint.layout import record
from jtrain.errors import CheckpointError
from jtrain.train.hooks import step_record

CLOSE = 1e-5  # of the loss of one device
_COUNT = 40
_PATIENCE = 240.0  # seconds for a part of a run, on a machine that does much else
_START = """
import sys
from jtrain.distributed.launcher import launch
processes, devices, *command = sys.argv[1:]
sys.exit(launch(command, processes=int(processes), devices=int(devices)))
"""


class Layout(NamedTuple):
    """How a state is split, over devices of so many processes."""

    kind: str
    """data, fsdp or tensor; single: one device."""
    devices: int
    """Of all processes together."""
    processes: int

    def __str__(self) -> str:
        """`fsdp 8 in 4`."""
        return f"{self.kind} {self.devices} in {self.processes}"


ALONE = Layout("single", 1, 1)
LAYOUTS = (
    ALONE,
    *(
        Layout(kind, devices, processes)
        for devices in (2, 4, 8)
        for processes in (1, 2, 4)
        for kind in ("data", "fsdp", "tensor")
        if processes <= devices
    ),
)
# Each layout is on both sides: 34 of the 40 pairs are of two kinds, 36 of two numbers of devices,
# 28 of two numbers of processes.
PAIRS = tuple(
    (save, LAYOUTS[(place + far) % len(LAYOUTS)])
    for far in (7, 11)
    for place, save in enumerate(LAYOUTS)
)[:_COUNT]


def layouts(seed: int, folder: Path) -> Trial:
    """Stopped under the first layout of pair `seed` at a step by the seed, ended under the second.

    The second restores what the first saved, on its devices, and saves that at once: both
    checkpoints hold the same bytes, and these have the fingerprints that were taken on the devices.
    The global batch of each of the 50 steps is that of an uninterrupted run on one device, and the
    loss of each is within 1e-5 of its.
    """
    began = time.monotonic()
    save, restore = PAIRS[(seed - 1) % len(PAIRS)]
    step = random.Random(seed).randrange(5, STEPS - 10)
    alone, place = uninterrupted(folder), folder / f"layouts-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    faults = trained(place, save, stop=step) or trained(place, restore, stop=0)
    apart = float("nan")
    if not faults:
        apart, faults = differences(place, alone, step)
    if not faults:
        shutil.rmtree(place)
    seen = f"{save} processes, step {step}, then {restore}; losses {apart:.1e} apart"
    detail = "; ".join([seen, *faults])
    return Trial("layouts", seed, not faults, time.monotonic() - began, detail)


def uninterrupted(folder: Path) -> Path:
    """Where the run on one device lies; made once."""
    place = folder / "alone"
    if not place.exists():
        made = folder / "alone.new"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        if faults := trained(made, ALONE, stop=0):
            raise RuntimeError(f"the run on one device: {faults[0]}")
        made.rename(place)
    return place


def differences(place: Path, alone: Path, step: int) -> tuple[float, list[str]]:
    """How far the losses are from those of one device, relatively; and what is otherwise at all."""
    faults = _other_bits(place, step)
    if (found := batches(place)) != (expected := batches(alone)):
        faults.append(f"other batches: {found} and not {expected}")
    losses, there = (step_record.steps(run / RUN / "steps.jsonl") for run in (place, alone))
    if not list(losses) == list(there) == list(range(1, STEPS + 1)):
        return float("nan"), [*faults, f"steps {list(losses)} were recorded"]
    apart = max(abs(losses[n].loss / there[n].loss - 1) for n in there)
    if not apart <= CLOSE:
        faults.append(f"losses are {apart:.1e} from those of one device")
    return apart, faults


def batches(place: Path) -> str:
    """A hash of the rows of all global batches in turn, put together from what processes read.

    Raises:
        ValueError: if processes do not agree on a row, or nobody read it.
    """
    seen: dict[int, dict[str, int]] = {}
    for path in sorted(place.glob(SEEN.format("*", "*"))):
        for line in path.read_text().splitlines():
            step, rows = json.loads(line)
            known = seen.setdefault(step, {})
            if other := [row for row in rows if known.get(row, rows[row]) != rows[row]]:
                raise ValueError(f"row {other[0]} of step {step} was read as two")
            known |= rows
    whole = [sorted(seen.get(step, {}).items()) for step in range(1, STEPS + 1)]
    if short := [n for n, rows in enumerate(whole, 1) if len(rows) != len(whole[0]) or not rows]:
        raise ValueError(f"nobody read all rows of step {short[0]}")
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def _other_bits(place: Path, step: int) -> list[str]:
    """What is not the same in the checkpoint of a step, and in that made of it when restored."""
    first, second = place / RUN / "checkpoints", place / AGAIN
    try:
        said, again = record(first, step), record(second, step)
    except CheckpointError as error:
        return [str(error)]
    names = list(said["fingerprints"])
    if said["leaves"] != again["leaves"] or not names:
        return ["other leaves were saved again"]
    before, after = (read_arrays(where, step, names) for where in (first, second))
    prints = fingerprint.read(fingerprint.begin(before))  # of what is on the disk, on the host
    return [
        f"{name} is not what was saved"
        for name in names
        if before[name].tobytes() != after[name].tobytes()
        or not said["fingerprints"][name] == again["fingerprints"][name] == prints[name]
    ]


def trained(place: Path, layout: Layout, *, stop: int) -> list[str]:
    """A run under a layout, begun or gone on with, to its end or to a step; how that failed."""
    each = layout.devices // layout.processes
    words = [sys.executable, "-c", _START, f"{layout.processes}", f"{each}"]
    worker = [sys.executable, "-m", "chaos.laid"]
    asked = [layout.kind, f"{layout.devices}", f"{each}", f"{stop}"]
    said = place / ("said-first.txt" if stop else "said-then.txt")
    with said.open("w") as told:
        code = _ended([*words, *worker, *asked], place, told.fileno())
    last = " / ".join(said.read_text().splitlines()[-6:])
    return [f"{layout} ended with {code}: {last}"] if code else []


def _ended(command: Sequence[str], place: Path, told: int) -> int | None:
    """The exit code; None if it did not end in time, and was killed."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("JTRAIN_")}
    environ = {
        **known,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=1",
        "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled"),
        "NPROC": "32",  # XLA's threads: with few, those of eight devices starve one another
    }
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode
