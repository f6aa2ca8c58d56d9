"""Failing file operations: a full disk, an error of the disk, an exceeded quota."""

import errno
import random
import shutil
import time
from pathlib import Path

from chaos.forked import said, server
from chaos.kills import differs, finished, uninterrupted
from chaos.points import NEW, OLD, copy_of_template, operations
from chaos.trial import Trial

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_SOON = 5.0  # seconds within which a failure has to be reported


def failing_write(seed: int, folder: Path) -> Trial:
    """Make operation n of a save fail once, then it and all later ones, by three errors in turn.

    After a single failure the state is saved. A permanent failure is reported within 5 s with the
    path, the free and the needed space, and ends as an error; valid steps are lost only where the
    policy deletes them for space. When the disk recovers, the next save succeeds.
    """
    began = time.monotonic()
    error, points = ERRORS[seed % len(ERRORS)], operations(folder)
    point = (seed // len(ERRORS)) % points + 1
    place = copy_of_template(folder, f"failing-{seed}")
    found = server(folder).run("save_failing", place, step=NEW, error=error, point=point)
    lines = [line for _, line in found["told"]]
    wrong = ""
    if found["wrong"] or NEW + 2 not in found["steps"]:
        wrong = f"after the disk recovered: {found['steps']}, wrong {found['wrong']}"
    elif found["once"] == 0 and not {max(OLD), NEW, NEW + 1} & set(found["steps"]):
        wrong = f"valid steps are missing: {found['steps']}"
    elif found["ended"] and len(lines) < 2:
        wrong = f"the run ended after {len(lines)} reports"
    elif not found["ended"] and NEW + 1 not in found["steps"]:
        wrong = f"step {NEW + 1} is missing, and nothing was reported"
    elif found["seconds"] > _SOON:
        wrong = f"the report took {found['seconds']:.1f} s"
    else:
        wrong = next((f"reported: {line}" for line in lines if not _is_complete(line, place)), "")
    if not wrong:
        shutil.rmtree(place)
    name = errno.errorcode[error]
    detail = wrong or (
        f"{name} at operation {point} of {points}: single failure reported {found['once']} times; "
        f"permanent failure {'ended' if found['ended'] else 'not noticed, since not needed'} "
        f"after {found['seconds']:.1f} s"
    )
    return Trial("failing_write", seed, not wrong, time.monotonic() - began, detail)


def full_disk_run(seed: int, folder: Path) -> Trial:
    """Fill the disk of a complete run for a while, or permanently.

    The run continues and ends like an undisturbed run, or its exit code is not 0; then the same
    command, with a working disk, ends like an undisturbed run.
    """
    began, draw = time.monotonic(), random.Random(seed)
    expected = uninterrupted(folder, 1)
    place = folder / f"full-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    first = draw.randint(1, expected["operations"])
    last = first + draw.choice((0, 1, 3, 10**9))
    fail = [draw.choice(ERRORS), first, last]
    process = server(folder).start("train", place, fail=fail)
    code, wrong = process.wait(180.0), ""
    if code is None:
        process.kill()
        wrong = "the run hangs"
    elif code == 0:
        wrong = differs(place, expected)
    elif "could not be written" not in said(place) and "cannot be written" not in said(place):
        wrong = f"the run ended with {code} without a reason: {said(place)[-800:]}"
    wrong = wrong or finished(place, 1, expected)
    if not wrong:
        shutil.rmtree(place)
    until = "permanently" if last > 10**8 else f"to {last}"
    what = f"{errno.errorcode[fail[0]]} from operation {first} {until}"
    detail = wrong or f"{what}: ended with {code}, then bitwise the uninterrupted run"
    return Trial("full_disk_run", seed, not wrong, time.monotonic() - began, detail)


def _is_complete(line: str, place: Path) -> bool:
    """Return whether a report is complete.

    A report names the path, the needed space and, on a full disk, the free space; or the checkpoint
    that was deleted for space, or a file that could not be deleted.
    """
    if "was deleted to make room" in line:
        return True
    if "cannot be removed (" in line or "cannot be deleted (" in line:  # the save is complete
        return str(place.resolve()) in line
    space = ("free",) if "ake room" in line else ()
    expected = ("could not be written", str(place.resolve()), "it takes", *space)
    return all(word in line for word in expected)
