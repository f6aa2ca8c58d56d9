"""Seconds from the command to the first finished step: two processes over one.

Both train the transformer of configs/shakespeare.yaml on two CPU devices: one process with
both, or two with one each, by `jtrain launch`. Cold: an empty compile cache; warm: that of the run
before. They take turns.

    python benchmarks/processes_start.py [--rounds 3]
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import machine, ratio, table, take_turns

ROOT = Path(__file__).parent.parent
RUN = ["run", "configs/shakespeare.yaml", "log.every=1"]
JTRAIN = [sys.executable, "-m", "jtrain"]
COMMANDS = {
    "one process": [*JTRAIN, *RUN, "parallel.devices=2"],
    "two processes": [*JTRAIN, "launch", "--processes", "2", "--devices", "1", *RUN],
}


def seconds_to_first_step(command: list[str], cache: Path, *, warm: bool) -> float:
    """Wall time from the start of the command to its line `step 1 ...`."""
    if not warm:
        shutil.rmtree(cache, ignore_errors=True)
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as there:
        for name in ("configs", "experiments"):
            shutil.copytree(ROOT / name, Path(there) / name)
        began = time.perf_counter()
        with subprocess.Popen(
            command,
            cwd=there,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.split()[:1] == ["step"]:
                    took = time.perf_counter() - began
                    break
            else:
                raise RuntimeError(f"{command} ended before its first step")
            child.send_signal(signal.SIGKILL)  # what it started ends with it
    return took


def main() -> None:
    """Prints a table for a cold and a warm cache."""
    parser = argparse.ArgumentParser(description="Seconds to the first finished step.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(machine())
    with tempfile.TemporaryDirectory() as caches:
        for warm in (False, True):
            contestants = {
                name: lambda name=name, warm=warm: seconds_to_first_step(
                    COMMANDS[name], Path(caches) / name.replace(" ", "-"), warm=warm
                )
                for name in COMMANDS
            }
            times = take_turns(contestants, rounds, warmup=int(warm))
            print(f"\n{'warm' if warm else 'cold'}\n\n{table(times, 's', 'one process')}")
            print(ratio(times["two processes"], times["one process"]), flush=True)


if __name__ == "__main__":
    main()
