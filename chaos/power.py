"""Power cuts: states that a disk may have after unsynced writes, drawn from a recording.

The model is that of ALICE, Pillai et al. 2014 (OSDI): the contents of a file and the names in a
folder are durable once that file or that folder was synced. Any part of all other operations before
the cut may be on the disk, in any order: a name without its bytes, half of a write, zeros in its
place, a rename without the creation before it.
"""

import functools
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chaos.disk import Disk, Operation, recorded
from chaos.forked import server
from chaos.trial import Trial

STATES = 10  # per trial


def power_cut(seed: int, folder: Path) -> Trial:
    """Cut the power ten times during six saves, the second of them made twice; check the states.

    The last announced step, or a later one, has to restore, as has every step that is listed; and
    the next start takes it.
    """
    began, draw = time.monotonic(), random.Random(seed)
    log = recording(folder)
    cuts: dict[str, tuple[int, int | None]] = {}
    cuts_made = []
    home = folder / f"cut-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    for number in range(STATES):
        cut = draw.randint(1, len(log))
        announced = max((each.inode for each in log[:cut] if each.what == "mark"), default=None)
        disk = Disk(log[:cut], draw)
        disk.write(home / str(number))
        cuts_made.append(f"{cut}:{disk.dropped}")
        cuts[str(number)] = cut, announced
    places = {name: str(home / name / _WHERE) for name in cuts}
    found = server(folder).run("after_cuts", home, there=places, step=99)
    wrong = ""
    for name, (cut, announced) in cuts.items():
        if what := _wrong(found[name], announced):
            wrong = f"cut after operation {cut} of {len(log)} ({home / name}): {what}"
    if not wrong:
        shutil.rmtree(home)
    detail = (
        wrong or f"{STATES} states of {len(log)} operations (cut:dropped {' '.join(cuts_made)})"
    )
    return Trial("power_cut", seed, not wrong, time.monotonic() - began, detail)


def recording(folder: Path) -> list[Operation]:
    """Return the operations of six saves into a new folder, with their data."""
    return _read(folder)


@functools.cache
def _read(folder: Path) -> list[Operation]:
    log = folder / "operations.log"
    if not log.exists():
        place = folder / "recorded"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        made = folder / "operations.new"
        made.unlink(missing_ok=True)
        server(folder).run("save_recorded", place, log=str(made))
        made.rename(log)
    found = list(recorded(log, folder / "recorded"))
    _check(found, folder / "recorded")
    return found


def _check(log: list[Operation], place: Path) -> None:
    """Raise if an operation escaped the recording: replayed in full it must yield the files."""
    full = Disk(log, None)
    again = place.with_name("again")
    shutil.rmtree(again, ignore_errors=True)
    full.write(again)
    names = lambda root: dict(_files(root / "runs"))
    assert names(again) == names(place), "operations were missed: the states are meaningless"
    shutil.rmtree(again)


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        yield str(path.relative_to(root)), path.read_bytes() if path.is_file() else b""


def _wrong(found: Mapping[str, Any], announced: int | None) -> str:
    """Return which promise a state breaks; empty if none."""
    if found["before"]["wrong"]:
        return f"listed and not restored: {found['before']['wrong']}"
    if announced is not None and (found["resumed"] is None or found["resumed"] < announced):
        return f"step {announced} was announced, and the run resumes from {found['resumed']}"
    return "" if 99 in found["steps"] and not found["wrong"] else f"the next save: {found}"


_WHERE = Path("runs") / "cut" / "checkpoints"
