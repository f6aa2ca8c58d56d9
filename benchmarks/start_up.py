"""Seconds from the command to the first finished step, over a script written by hand.

Both train the character transformer of configs/shakespeare.yaml on the plays. Cold: an empty
compile cache; warm: that of the run before. Each is a process of its own; they take turns.

    python benchmarks/start_up.py [--rounds 5]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import machine, ratio, table, take_turns

ROOT = Path(__file__).parent.parent
SIZES = {"context": 64, "layers": 4, "heads": 4, "width": 128}
HAND = json.dumps({"sizes": SIZES, "batch": 16, "steps": 1, "clip": 1.0})
OURS = "from jtrain.cli import main; main(['run', 'configs/shakespeare.yaml', 'log.every=1'])"
COMMANDS = {
    "by hand": [sys.executable, str(ROOT / "benchmarks" / "peers" / "by_hand.py"), HAND],
    "jtrain": [sys.executable, "-c", OURS],
}


def seconds_to_first_step(command: list[str], cache: Path, *, warm: bool) -> float:
    """Wall time from the start of the process to its line `step 1 ...`."""
    if not warm:
        shutil.rmtree(cache, ignore_errors=True)
    shown = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as there:
        for name in ("configs", "experiments"):
            shutil.copytree(ROOT / name, Path(there) / name)
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=there, env={**os.environ, **shown}, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.split()[:1] == ["step"]:
                    took = time.perf_counter() - began
                    child.kill()
                    return took
    raise RuntimeError(f"{command[:2]} ended before its first step")


def main() -> None:
    """Print a table for a cold and a warm cache."""
    parser = argparse.ArgumentParser(description="Seconds to the first finished step.")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as caches:
        for warm in (False, True):
            contestants = {
                name: lambda command=command, name=name, warm=warm: seconds_to_first_step(
                    command, Path(caches) / name, warm=warm
                )
                for name, command in COMMANDS.items()
            }
            times = take_turns(contestants, given.rounds)
            print(f"\n{'warm' if warm else 'cold'} compile cache\n")
            print(table(times, "seconds", "by hand"))
            print(f"\nratio: {ratio(times['jtrain'], times['by hand'])}")


if __name__ == "__main__":
    main()
