"""Two writers in one directory, and directories that cannot be written."""

import errno
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from chaos.forked import said, server
from chaos.trial import Trial

_HAMMERED = 25.0  # seconds
_AT_ONCE = 1.0  # second within which a second writer is refused
_EARLY = 2.0  # seconds within which an unwritable directory is refused


def two_writers(seed: int, folder: Path) -> Trial:
    """Save from two processes into one directory for 25 s, as often as each gets the lock.

    A process holds the lock for a random number of saves, and releases it; meanwhile the other is
    refused within a second, with the host, the process and the time of the lock. Every listed step
    is valid, and comes from one process alone.
    """
    began = time.monotonic()
    place = folder / f"writers-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    processes = []
    for who in (1, 2):
        given = {"who": who, "seconds": _HAMMERED, "seed": seed * 2 + who}
        command = [sys.executable, "-m", "chaos.tasks", "hammer", str(place)]
        environ = server(folder).environ
        processes.append(
            subprocess.Popen([*command, json.dumps(given)], env=environ, stderr=subprocess.PIPE)
        )
    for process in processes:
        _, complaint = process.communicate(timeout=_HAMMERED + 120)
        assert process.returncode == 0, complaint.decode()[-1000:]
    records = [json.loads((place / f"hammer-{who}.json").read_text()) for who in (1, 2)]
    found = server(folder).run("hammered", place)
    refusals = [each for record in records for each in record["refused"]]
    pattern = r"process \d+ on \S+ writes there since \d{4}-\d\d-\d\d "
    wrong = ""
    if found["wrong"]:
        wrong = f"mixed or broken: {found['wrong']}"
    elif not all(record["saved"] for record in records) or not refusals:
        wrong = f"no conflict: {[record['saved'] for record in records]}, {len(refusals)} refusals"
    elif slow := [seconds for seconds, _ in refusals if seconds > _AT_ONCE]:
        wrong = f"{len(slow)} of {len(refusals)} refused after more than 1 s, at most {max(slow)}"
    elif other := [line for _, line in refusals if not re.search(pattern, line)]:
        wrong = f"refused with: {other[0]}"
    if not wrong:
        shutil.rmtree(place)
    saves, most = (
        [record["saved"] for record in records],
        max((each[0] for each in refusals), default=0),
    )
    detail = wrong or (
        f"{saves[0]} and {saves[1]} saves, {len(refusals)} refusals within {most:.2f} s; "
        f"{len(found['steps'])} steps left, none mixed"
    )
    return Trial("two_writers", seed, not wrong, time.monotonic() - began, detail)


def no_place(seed: int, folder: Path) -> Trial:
    """Run in a directory that is read-only, another user's, or a file: refused before reading data.

    The error of the disk is injected, so that a superuser gets it too.
    """
    began, draw = time.monotonic(), random.Random(seed)
    place = folder / f"place-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    kind = draw.choice(("EROFS", "EACCES", "EPERM", "file"))
    error = 0 if kind == "file" else getattr(errno, kind)
    process = server(folder).start("train_nowhere", place, error=error)
    code = process.wait(60.0)
    if code is None:
        process.kill()
    gave = place / "nowhere.json"
    found = json.loads(gave.read_text()) if gave.exists() else {}
    wrong = ""
    if not found or found["read"]:
        wrong = f"not refused before reading data: {code}, {said(place)[-500:]}"
    elif found["seconds"] > _EARLY:
        wrong = f"refused after {found['seconds']:.1f} s"
    elif str(place.resolve() / "runs") not in found["told"]:
        wrong = f"refused without the path: {found['told']}"
    if not wrong:
        shutil.rmtree(place)
    detail = wrong or f"{kind}: {found['seconds']:.2f} s, {found['told'][-150:]}"
    return Trial("no_place", seed, not wrong, time.monotonic() - began, detail)
