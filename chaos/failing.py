"""File operations that fail: with no room, an error of the disk, no quota."""

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
_SOON = 5.0  # seconds in which a failure is told


def failing_write(seed: int, folder: Path) -> Trial:
    """Operation n of a save fails once, then it and all after it, by each of three errors in turn.

    Once: the state is saved all the same. For ever: that is told within 5 s with the path, what is
    free and what is needed, ends as an error, and no step that was whole is gone but those that the
    policy gives up for room. When the disk takes writes again the next save is made.
    """
    began = time.monotonic()
    error, points = ERRORS[seed % len(ERRORS)], operations(folder)
    point = (seed // len(ERRORS)) % points + 1
    place = copy_of_template(folder, f"failing-{seed}")
    found = server(folder).run("save_failing", place, step=NEW, error=error, point=point)
    lines = [line for _, line in found["told"]]
    wrong = ""
    if found["wrong"] or NEW + 2 not in found["steps"]:
        wrong = f"when there was room again: {found['steps']}, wrong {found['wrong']}"
    elif found["once"] == 0 and not {max(OLD), NEW, NEW + 1} & set(found["steps"]):
        wrong = f"whole steps are gone: {found['steps']}"
    elif found["ended"] and len(lines) < 2:
        wrong = f"it ended and was told {len(lines)} times"
    elif not found["ended"] and NEW + 1 not in found["steps"]:
        wrong = f"step {NEW + 1} is not there, and nothing was told"
    elif found["seconds"] > _SOON:
        wrong = f"it took {found['seconds']:.1f} s to be told"
    else:
        wrong = next((f"told: {line}" for line in lines if not _says_all(line, place)), "")
    if not wrong:
        shutil.rmtree(place)
    name = errno.errorcode[error]
    detail = wrong or (
        f"{name} at operation {point} of {points}: once told {found['once']} times; for ever "
        f"{'ended' if found['ended'] else 'not noticed, for it was not needed'} after "
        f"{found['seconds']:.1f} s"
    )
    return Trial("failing_write", seed, not wrong, time.monotonic() - began, detail)


def full_disk_run(seed: int, folder: Path) -> Trial:
    """A whole run whose disk is full for a while, or from some moment on.

    It goes on and ends as if nothing had been, or it ends with a code that is not 0; then the same
    command, with room, ends as if nothing had been.
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
        wrong = "it hangs"
    elif code == 0:
        wrong = differs(place, expected)
    elif "could not be written" not in said(place) and "cannot be written" not in said(place):
        wrong = f"it ended with {code} and did not say why: {said(place)[-800:]}"
    wrong = wrong or finished(place, 1, expected)
    if not wrong:
        shutil.rmtree(place)
    until = "for ever" if last > 10**8 else f"to {last}"
    what = f"{errno.errorcode[fail[0]]} from operation {first} {until}"
    detail = wrong or f"{what}: ended with {code}, then bitwise the uninterrupted run"
    return Trial("full_disk_run", seed, not wrong, time.monotonic() - began, detail)


def _says_all(line: str, place: Path) -> bool:
    """Whether it names the place, what is needed and, where room is lacking, what is free; or what
    went to make room, or what could not be deleted."""
    if "was deleted to make room" in line:
        return True
    if "cannot be removed (" in line or "cannot be deleted (" in line:  # the save is whole
        return str(place.resolve()) in line
    lacking = ("free",) if "ake room" in line else ()
    asked = ("could not be written", str(place.resolve()), "it takes", *lacking)
    return all(word in line for word in asked)
