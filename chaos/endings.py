"""Programs that end during a save."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from chaos.forked import server
from chaos.trial import Trial

HOW = ("end", "exit", "raise", "interrupt")
_PATIENCE = 120.0


def end_in_a_save(seed: int, folder: Path) -> Trial:
    """End, exit, raise in or interrupt a script during a save, without closing anything.

    The checkpoint has to be valid, or the exit code not 0; and the program has to end.
    """
    began, draw = time.monotonic(), random.Random(seed)
    how, work = HOW[seed % len(HOW)], folder / f"ending-{seed}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    given = json.dumps({"how": how, "size": draw.choice((1000, 300_000, 3_000_000))})
    command = [sys.executable, "-m", "chaos.tasks", "end", str(work), given]
    process = subprocess.Popen(
        command, env=server(folder).environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # the save has begun
    if how == "interrupt":
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGINT)
    wrong = ""
    try:
        process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        wrong = "the program does not end"
    found = server(folder).run("listed", work)
    if not wrong and process.returncode == 0 and found["steps"] != [1]:
        wrong = f"exit code 0 and no checkpoint: {found}"
    if found["wrong"]:
        wrong = f"listed and not restored: {found}"
    if not wrong:
        shutil.rmtree(work)
    presence = "with" if found["steps"] else "without"
    detail = wrong or f"{how}: ended with {process.returncode} {presence} its checkpoint"
    return Trial("end_in_a_save", seed, not wrong, time.monotonic() - began, detail)
