"""Kills before each file operation of a save and the deletion after it."""

import shutil
import time
from pathlib import Path

from chaos.forked import said, server
from chaos.trial import Trial

OLD = (1, 2)  # the steps that were saved before; two are retained
NEW = 3


def crash_point(seed: int, folder: Path) -> Trial:
    """Kill before operation `seed` of a save that deletes the oldest step.

    Then every listed step restores, the newest step is a valid one, the next save works, and no
    litter is left. Seeds past the last operation start over.
    """
    began = time.monotonic()
    points = operations(folder)
    point = (seed - 1) % points + 1
    place = copy_of_template(folder, f"point-{seed}")
    process = server(folder).start("save", place, step=NEW, kill_at=point)
    code = process.wait(60.0)
    wrong = "" if code in (-9, 0) else f"the save ended with {code}: {said(place)[-1000:]}"
    wrong = wrong or _after(folder, place)
    if not wrong:
        shutil.rmtree(place)
    detail = wrong or f"operation {point} of {points}" + ("" if code else ", which was not reached")
    return Trial("crash_point", seed, not wrong, time.monotonic() - began, detail)


def operations(folder: Path) -> int:
    """Return the operations of one save and one deletion: the maximum, since threads vary it."""
    file = folder / "operations.txt"
    if not file.exists():
        counts = []
        for _ in range(3):
            place = copy_of_template(folder, "counted")
            counts.append(server(folder).run("save", place, step=NEW)["operations"])
            shutil.rmtree(place)
        file.write_text(str(max(counts)))
    return int(file.read_text())


def copy_of_template(folder: Path, name: str) -> Path:
    """Create a directory whose checkpoints are the steps OLD."""
    template, place = folder / "two-steps", folder / name
    if not template.exists():
        made = folder / "two-steps.new"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        for step in OLD:
            server(folder).run("save", made, step=step)
        made.rename(template)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place)
    return place


def _after(folder: Path, place: Path) -> str:
    """Return what is wrong after a kill; empty if nothing."""
    found = server(folder).run("check_steps", place)
    if found["wrong"]:
        return f"listed and not restored: {found['wrong']}"
    if not set(found["steps"]) >= {max(OLD)}:
        return f"a valid step is missing: {found['steps']} are left"
    newest = found["steps"][-1]
    found = server(folder).run("resume", place, step=NEW + 1)
    if found["resumed"] != newest or found["news"]:
        return f"the run resumes from {found['resumed']} instead of {newest}: {found['news']}"
    if found["wrong"] or found["steps"] != [newest, NEW + 1]:
        return f"after the next save there are {found['steps']}, wrong {found['wrong']}"
    if found["names"] != [str(step) for step in found["steps"]]:
        return f"litter: {found['names']}"
    return ""
