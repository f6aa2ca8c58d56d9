"""Resumed runs under another layout: the same bits, the same batches, the same losses.

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
from jtrain.checkpoint.inspect import read_arrays
from jtrain.checkpoint.layout import read_record
from jtrain.errors import CheckpointError
from jtrain.parallel import fingerprint
from jtrain.train.hooks import step_record

CLOSE = 1e-5  # relative to the loss on one device
_COUNT = 40
_PATIENCE = 240.0  # seconds for a part of a run on a busy machine
_START = """
import sys
from jtrain.distributed.launcher import launch
processes, devices, *command = sys.argv[1:]
sys.exit(launch(command, processes=int(processes), devices=int(devices)))
"""


class Layout(NamedTuple):
    """A sharding of the state, over the devices of some processes."""

    kind: str
    """data, fsdp or tensor; single: one device."""
    devices: int
    """Devices of all processes."""
    processes: int

    def __str__(self) -> str:
        """Return `fsdp 8 in 4`."""
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
# Each layout is on both sides: 34 of the 40 pairs have two kinds, 36 two numbers of devices, 28 two
# numbers of processes.
PAIRS = tuple(
    (save, LAYOUTS[(index + offset) % len(LAYOUTS)])
    for offset in (7, 11)
    for index, save in enumerate(LAYOUTS)
)[:_COUNT]


def layouts(seed: int, folder: Path) -> Trial:
    """Stop under the first layout of pair `seed` at a random step, and end under the second.

    The second restores the checkpoint of the first on its devices, and saves it again at once: both
    checkpoints hold the same bytes, with the fingerprints that were taken on the devices. The
    global batch of each of the 50 steps is that of an uninterrupted run on one device, and the loss
    of each step is within 1e-5 of that run's.
    """
    began = time.monotonic()
    save, restore = PAIRS[(seed - 1) % len(PAIRS)]
    step = random.Random(seed).randrange(5, STEPS - 10)
    single, place = uninterrupted(folder), folder / f"layouts-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    faults = trained(place, save, stop=step) or trained(place, restore, stop=0)
    difference = float("nan")
    if not faults:
        difference, faults = differences(place, single, step)
    if not faults:
        shutil.rmtree(place)
    summary = f"{save} processes, step {step}, then {restore}; losses differ by {difference:.1e}"
    detail = "; ".join([summary, *faults])
    return Trial("layouts", seed, not faults, time.monotonic() - began, detail)


def uninterrupted(folder: Path) -> Path:
    """Return the folder of the run on one device; the run is made once."""
    place = folder / "alone"
    if not place.exists():
        made = folder / "alone.new"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        if faults := trained(made, ALONE, stop=0):
            raise RuntimeError(f"the run on one device: {faults[0]}")
        made.rename(place)
    return place


def differences(place: Path, single: Path, step: int) -> tuple[float, list[str]]:
    """Return the largest relative difference of the losses from one device's, and all faults."""
    faults = _other_bits(place, step)
    if (found := batches(place)) != (expected := batches(single)):
        faults.append(f"other batches: {found} and not {expected}")
    losses, expected_losses = (
        step_record.read_step_records(run / RUN / "steps.jsonl") for run in (place, single)
    )
    if not list(losses) == list(expected_losses) == list(range(1, STEPS + 1)):
        return float("nan"), [*faults, f"steps {list(losses)} were recorded"]
    difference = max(abs(losses[n].loss / expected_losses[n].loss - 1) for n in expected_losses)
    if not difference <= CLOSE:
        faults.append(f"losses differ by {difference:.1e} from those of one device")
    return difference, faults


def batches(place: Path) -> str:
    """Hash the rows of all global batches in order, merged from the rows of the processes.

    Raises:
        ValueError: if processes differ in a row, or no process read it.
    """
    rows_by_step: dict[int, dict[str, int]] = {}
    for path in sorted(place.glob(SEEN.format("*", "*"))):
        for line in path.read_text().splitlines():
            step, rows = json.loads(line)
            known = rows_by_step.setdefault(step, {})
            if other := [row for row in rows if known.get(row, rows[row]) != rows[row]]:
                raise ValueError(f"row {other[0]} of step {step} was read with two contents")
            known |= rows
    merged = [sorted(rows_by_step.get(step, {}).items()) for step in range(1, STEPS + 1)]
    if short := [n for n, rows in enumerate(merged, 1) if len(rows) != len(merged[0]) or not rows]:
        raise ValueError(f"no process read all rows of step {short[0]}")
    return hashlib.sha256(json.dumps(merged).encode()).hexdigest()[:16]


def _other_bits(place: Path, step: int) -> list[str]:
    """Return the differences between the checkpoint of a step and its restored copy."""
    first, second = place / RUN / "checkpoints", place / AGAIN
    try:
        original, copy = read_record(first, step), read_record(second, step)
    except CheckpointError as error:
        return [str(error)]
    names = list(original["fingerprints"])
    if original["leaves"] != copy["leaves"] or not names:
        return ["the copy has other leaves"]
    before, after = (read_arrays(where, step, names) for where in (first, second))
    prints = fingerprint.read(fingerprint.start(before))  # of the files, on the host
    return [
        f"{name} differs from the saved leaf"
        for name in names
        if before[name].tobytes() != after[name].tobytes()
        or not original["fingerprints"][name] == copy["fingerprints"][name] == prints[name]
    ]


def trained(place: Path, layout: Layout, *, stop: int) -> list[str]:
    """Start or resume a run under a layout, to its end or to a step; return its failure."""
    each = layout.devices // layout.processes
    words = [sys.executable, "-c", _START, f"{layout.processes}", f"{each}"]
    worker = [sys.executable, "-m", "chaos.laid"]
    arguments = [layout.kind, f"{layout.devices}", f"{each}", f"{stop}"]
    file = place / ("said-first.txt" if stop else "said-then.txt")
    with file.open("w") as output:
        code = _run([*words, *worker, *arguments], place, output.fileno())
    last = " / ".join(file.read_text().splitlines()[-6:])
    return [f"{layout} ended with {code}: {last}"] if code else []


def _run(command: Sequence[str], place: Path, output: int) -> int | None:
    """Run a command; return its exit code, None if it was killed at the time limit."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("JTRAIN_")}
    environ = {
        **known,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=1",
        "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled"),
    }
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode
