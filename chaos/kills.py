"""SIGKILL at moments that a seed draws: the run that goes on ends as if nobody had killed it."""

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
_PATIENCE = 180.0  # seconds for a run, on a machine that does much else
_SAME = ("status", "step", "leaves", "batches", "metrics")


def sigkill(seed: int, folder: Path) -> Trial:
    """Ten kills; whenever a run comes to its end between them another begins.

    A third of the kills come before a file operation that is drawn (in a save, its commit, a
    deletion, a row of metrics), the others after a time: of these some hit a process while it still
    imports, or compiles with nothing kept of earlier compilations.
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
    """What the run comes to that nobody kills, its file operations and its seconds."""
    kept = folder / f"uninterrupted-{each}.json"
    if not kept.exists():
        place = folder / f"uninterrupted-{each}"
        _measured(place, each)  # compiles what the next one finds
        kept.write_text(json.dumps(_measured(place, each)))
    return json.loads(kept.read_text())


def _measured(place: Path, each: int) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    start = time.monotonic()
    found = server(place.parent).run("train", place, patience=_PATIENCE, each=each)
    shutil.rmtree(place)
    return {**found, "seconds": time.monotonic() - start}


def _kill(place: Path, draw: random.Random, expected: Mapping[str, Any], each: int) -> str:
    """How the run was killed; empty if it came to its end before that."""
    kind = draw.choices(("operation", "time", "compiling", "importing"), (4, 6, 1, 1))[0]
    if kind == "importing":
        return _kill_fresh(place, draw.uniform(0, 3.0), each)
    given: dict[str, Any] = {"each": each}
    moment = draw.uniform(0, expected["seconds"])
    if kind == "operation":
        given["kill_at"] = draw.randint(1, expected["operations"])
    if kind == "compiling":
        given["compiled"] = str(place / "compiled")
        shutil.rmtree(place / "compiled", ignore_errors=True)
    process = server(place.parent).start("train", place, **given)
    code = process.wait(_PATIENCE if kind == "operation" else moment)
    if code is None:
        code = process.kill()
    if code == 0:
        return ""
    assert code == -9, f"the run ended by itself with {code}: {said(place)[-1500:]}"
    return f"operation {given['kill_at']}" if kind == "operation" else f"{kind} {moment:.2f} s"


def _kill_fresh(place: Path, moment: float, each: int) -> str:
    """Kills a process that is not forked, so that it has all to import."""
    words = [sys.executable, "-m", "chaos.tasks", "train", str(place)]
    environ = server(place.parent).environ
    with (place / "said.txt").open("wb") as told:
        process = subprocess.Popen(
            [*words, json.dumps({"each": each})], env=environ, stdout=told, stderr=told
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
    """How the run that is let finish differs from the uninterrupted one; empty if not."""
    try:
        server(place.parent).run("train", place, patience=_PATIENCE, each=each)
    except AssertionError as error:
        return f"it does not go on: {error}"
    return differs(place, expected)


def differs(place: Path, expected: Mapping[str, Any]) -> str:
    """How the run that was finished in `place` differs from the uninterrupted one."""
    found = json.loads((place / "gave.json").read_text())
    if other := [name for name in _SAME if found[name] != expected[name]]:
        return f"{', '.join(other)} differ from the uninterrupted run"
    return litter(place, expected["bytes"])


def litter(place: Path, state: int) -> str:
    """What lies in a run's directory that a finished run has no use for; empty if nothing."""
    directory = place / CHECKPOINTS
    names = {path.name for path in directory.iterdir()}
    steps = checkpoint_folder.steps(directory)
    if other := names - {str(step) for step in steps}:
        return f"litter: {', '.join(sorted(other))}"
    if len(steps) > KEPT + 1:
        return f"{len(steps)} checkpoints, where {KEPT} and the best are kept"
    files = [path for path in directory.rglob("*") if path.is_file()]
    taken, most = sum(path.stat().st_size for path in files), (KEPT + 1) * (state + _BESIDE)
    return f"{taken} bytes on the disk, and {most} at most" if taken > most else ""


_BESIDE = 30_000  # bytes of a checkpoint that are not arrays: config, versions, seal
