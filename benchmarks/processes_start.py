"""Seconds to the first finished step, on the wall and of CPU: two processes over one.

Both train the transformer of configs/shakespeare.yaml on two CPU devices: one process with
both, or two with one each, by `jtrain launch`. Cold: an empty compile cache; warm: that of the run
before. They take turns.

    python benchmarks/processes_start.py [--rounds 5]
"""

import argparse
import contextlib
import functools
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


def seconds_to_first_step(command: list[str], cache: Path, *, warm: bool) -> tuple[float, float]:
    """Measure the time from the command to `step 1 ...`: wall, and CPU of all its processes."""
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
                    took = time.perf_counter() - began, cpu_seconds(child.pid)
                    break
            else:
                raise RuntimeError(f"{command} ended before its first step")
            child.send_signal(signal.SIGKILL)  # what it started ends with it
    return took


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its running children; Linux only."""
    fields = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
    family = [pid]
    for one in family:
        family += [other for other, (_, parent, *_) in fields.items() if int(parent) == one]
    ticks = sum(int(fields[one][11]) + int(fields[one][12]) for one in family)
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print a table for a cold and a warm cache."""
    parser = argparse.ArgumentParser(description="Seconds to the first finished step.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(machine())
    with tempfile.TemporaryDirectory() as caches:
        for warm in (False, True):
            of_cpu = {name: [] for name in COMMANDS}

            def take(name: str, warm: bool = warm, of_cpu: dict[str, list] = of_cpu) -> float:
                cache = Path(caches) / name.replace(" ", "-")
                wall, cpu = seconds_to_first_step(COMMANDS[name], cache, warm=warm)
                of_cpu[name].append(cpu)
                return wall

            turns = {name: functools.partial(take, name) for name in COMMANDS}
            times = take_turns(turns, rounds, warmup=int(warm))
            print(f"\n{'warm' if warm else 'cold'}\n\n{table(times, 's', 'one process')}")
            print(ratio(times["two processes"], times["one process"]))
            used = {name: seconds[-rounds:] for name, seconds in of_cpu.items()}
            print(f"\n{table(used, 's of CPU', 'one process')}", flush=True)


if __name__ == "__main__":
    main()
