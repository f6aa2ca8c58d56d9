"""Two who would write in one directory, and directories in which nobody can."""

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
_AT_ONCE = 1.0  # second in which a second writer is refused
_EARLY = 2.0  # seconds in which a directory is refused that cannot be written


def two_writers(seed: int, folder: Path) -> Trial:
    """Two processes that save in one directory for 25 s, as often as each is let.

    One holds it for some saves, which the seed draws, and lets it go; the other is refused
    meanwhile, within a second and with the host, the process and since when. Every listed step is
    whole, and each is of one of them.
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
    told = [json.loads((place / f"hammer-{who}.json").read_text()) for who in (1, 2)]
    found = server(folder).run("hammered", place)
    refusals = [each for one in told for each in one["refused"]]
    pattern = r"process \d+ on \S+ writes there since \d{4}-\d\d-\d\d .* \(\d+ s\)"
    wrong = ""
    if found["wrong"]:
        wrong = f"mixed or broken: {found['wrong']}"
    elif not all(one["saved"] for one in told) or not refusals:
        wrong = f"they did not meet: {[one['saved'] for one in told]}, {len(refusals)} refusals"
    elif slow := [seconds for seconds, _ in refusals if seconds > _AT_ONCE]:
        wrong = f"{len(slow)} of {len(refusals)} refused after more than 1 s, at most {max(slow)}"
    elif other := [line for _, line in refusals if not re.search(pattern, line)]:
        wrong = f"refused with: {other[0]}"
    if not wrong:
        shutil.rmtree(place)
    saves, most = [one["saved"] for one in told], max((each[0] for each in refusals), default=0)
    detail = wrong or (
        f"{saves[0]} and {saves[1]} saves, {len(refusals)} refusals within {most:.2f} s; "
        f"{len(found['steps'])} steps left, none mixed"
    )
    return Trial("two_writers", seed, not wrong, time.monotonic() - began, detail)


def no_place(seed: int, folder: Path) -> Trial:
    """A run whose directory is read-only, another's, or a file: refused before its data is read.

    The error of the disk is injected, so that it is one for a superuser too.
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
        wrong = f"it was not refused before its data was read: {code}, {said(place)[-500:]}"
    elif found["seconds"] > _EARLY:
        wrong = f"refused after {found['seconds']:.1f} s"
    elif str(place.resolve() / "runs") not in found["told"]:
        wrong = f"told without the path: {found['told']}"
    if not wrong:
        shutil.rmtree(place)
    detail = wrong or f"{kind}: {found['seconds']:.2f} s, {found['told'][-150:]}"
    return Trial("no_place", seed, not wrong, time.monotonic() - began, detail)
