"""SIGKILL at random moments: the resumed run ends like the uninterrupted run."""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos.forked import said, server
from chaos.subject import KEPT
from chaos.tasks import CHECKPOINTS, RUN
from chaos.trial import Trial
from jtrain.checkpoint import layout as checkpoint_folder

KILLS = 10  # in one trial
_PATIENCE = 180.0  # seconds for a run on a busy machine
_SAME = ("status", "step", "leaves", "batches", "metrics")


def sigkill(seed: int, folder: Path) -> Trial:
    """Kill a run ten times; if the run ends between two kills, another run begins.

    A third of the kills come before a random file operation (in a save, its commit, a deletion, a
    row of metrics), the others at a random time: some of these hit a process while it imports, or
    compiles without a compilation cache.
    """
    began, draw = time.monotonic(), random.Random(seed)
    each = draw.choice((1, 3))
    expected = uninterrupted(folder, each)
    place = folder / f"sigkill-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    killed: list[str] = []
    wrong = ""
    while len(killed) < KILLS and not wrong:
        how = _kill(place, draw, expected, each)
        if how:
            killed.append(how)
        else:
            wrong = finished(place, each, expected)
            shutil.rmtree(place / RUN)
    wrong = wrong or finished(place, each, expected)
    if not wrong:
        shutil.rmtree(place)
    detail = wrong or f"{KILLS} kills ({', '.join(killed)}); bitwise the uninterrupted run"
    return Trial("sigkill", seed, not wrong, time.monotonic() - began, detail)


def uninterrupted(folder: Path, each: int) -> Mapping[str, Any]:
    """Return the result, the file operations and the seconds of an uninterrupted run."""
    file = folder / f"uninterrupted-{each}.json"
    if not file.exists():
        place = folder / f"uninterrupted-{each}"
        _measured(place, each)  # fills the compilation cache
        file.write_text(json.dumps(_measured(place, each)))
    return json.loads(file.read_text())


def _measured(place: Path, each: int) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    start = time.monotonic()
    found = server(place.parent).run("train", place, patience=_PATIENCE, each=each)
    shutil.rmtree(place)
    return {**found, "seconds": time.monotonic() - start}


def _kill(place: Path, draw: random.Random, expected: Mapping[str, Any], each: int) -> str:
    """Kill the run; return the way of the kill, empty if the run ended before."""
    kind = draw.choices(("operation", "time", "compiling", "importing"), (4, 6, 1, 1))[0]
    if kind == "importing":
        return _kill_fresh(place, draw.uniform(0, 3.0), each)
    arguments: dict[str, Any] = {"each": each}
    moment = draw.uniform(0, expected["seconds"])
    if kind == "operation":
        arguments["kill_at"] = draw.randint(1, expected["operations"])
    if kind == "compiling":
        arguments["compiled"] = str(place / "compiled")
        shutil.rmtree(place / "compiled", ignore_errors=True)
    process = server(place.parent).start("train", place, **arguments)
    code = process.wait(_PATIENCE if kind == "operation" else moment)
    if code is None:
        code = process.kill()
    if code == 0:
        return ""
    assert code == -9, f"the run ended by itself with {code}: {said(place)[-1500:]}"
    return f"operation {arguments['kill_at']}" if kind == "operation" else f"{kind} {moment:.2f} s"


def _kill_fresh(place: Path, moment: float, each: int) -> str:
    """Kill a process that is not forked, so that it imports everything."""
    words = [sys.executable, "-m", "chaos.tasks", "train", str(place)]
    environ = server(place.parent).environ
    with (place / "said.txt").open("wb") as output:
        process = subprocess.Popen(
            [*words, json.dumps({"each": each})], env=environ, stdout=output, stderr=output
        )
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.kill()
    code = process.wait()
    if code == 0:
        return ""
    assert code == -9, f"the run ended by itself with {code}: {said(place)[-1500:]}"
    return f"importing {moment:.2f} s"


def finished(place: Path, each: int, expected: Mapping[str, Any]) -> str:
    """Let the run finish; return its difference from the uninterrupted one, empty if none."""
    try:
        server(place.parent).run("train", place, patience=_PATIENCE, each=each)
    except AssertionError as error:
        return f"the run does not resume: {error}"
    return differs(place, expected)


def differs(place: Path, expected: Mapping[str, Any]) -> str:
    """Return how the finished run in `place` differs from the uninterrupted one."""
    found = json.loads((place / "gave.json").read_text())
    if other := [name for name in _SAME if found[name] != expected[name]]:
        return f"{', '.join(other)} differ from the uninterrupted run"
    return litter(place, expected["bytes"])


def litter(place: Path, state: int) -> str:
    """Return the files in a run's directory that a finished run does not need; empty if none."""
    directory = place / CHECKPOINTS
    names = {path.name for path in directory.iterdir()}
    steps = checkpoint_folder.list_steps(directory)
    if other := names - {str(step) for step in steps}:
        return f"litter: {', '.join(sorted(other))}"
    if len(steps) > KEPT + 1:
        return f"{len(steps)} checkpoints, where {KEPT} and the best are retained"
    files = [path for path in directory.rglob("*") if path.is_file()]
    taken, most = sum(path.stat().st_size for path in files), (KEPT + 1) * (state + _OVERHEAD)
    return f"{taken} bytes on the disk, and {most} at most" if taken > most else ""


_OVERHEAD = 30_000  # bytes of a checkpoint besides the arrays: config, versions, seal
