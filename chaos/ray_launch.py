"""`python -m chaos.ray_launch --trials 10`: kill parts of runs under `jtrain launch --engine ray`.

Each trial lets a small run of two processes end, and compares it with an undisturbed run: the rows
of metrics.jsonl byte for byte, the last state bit for bit. Of `private_kill` each trial has a
Ray cluster of its own, which must end with its launcher; the others share one.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from chaos.launched import STEPS, Run, alive, differences, home_of, until
from chaos.trial import Trial
from jtrain.distributed.launcher.port import free_port
from jtrain.errors import DONE, FAULT, STOPPED

MARK = "JTRAIN_TRIAL"  # in the environment of all processes of a trial
GONE = 30.0  # seconds after which no process may be left
STARTED = 300.0  # seconds for the processes to start on a busy machine
SLOW = {"FAULT": "none 0 0 /", "READ": "0.05 0.05", "COMPILE": "0"}


def child_kill(seed: int, folder: Path, address: str) -> Trial:
    """Kill the child of one of two actors at a random moment."""
    return _worker_kill("child_kill", seed, folder, address, actor=False)


def actor_kill(seed: int, folder: Path, address: str) -> Trial:
    """Kill one of two actors at a random moment; its child ends with it."""
    return _worker_kill("actor_kill", seed, folder, address, actor=True)


def _worker_kill(name: str, seed: int, folder: Path, address: str, *, actor: bool) -> Trial:
    draw, began, calm = random.Random(seed), time.monotonic(), undisturbed(folder, address)
    victim, faults, home = draw.randrange(2), [], folder / f"{name}-{seed}"
    with _started(home, "--address", address, "--restarts", "3") as run:
        moment = _wait_for_step(home, run, draw)
        workers = _workers(home)
        if len(workers) < 2:
            raise TimeoutError(f"{home}: the run ended before the fault")
        child = workers[victim]
        os.kill(_parent(child) if actor else child, signal.SIGKILL)
        at = time.monotonic()
        until(lambda: not any(map(alive, workers.values())), GONE)
        down = time.monotonic() - at
        code = run.wait()
        again = time.monotonic() - at
    if code or "Restarted (1 of 3)" not in run.words(200):
        faults = [f"exit code {code}: {run.words(20)}"]
    if left := _left(home):
        faults.append(f"left: {left}")
    summary = f"process {victim} killed {moment}, all down {down:.2f} s, done {again:.1f} s later"
    return _trial(name, seed, began, home, faults, calm, summary)


def driver_kill(seed: int, folder: Path, address: str) -> Trial:
    """Kill the launcher at a random moment; its actors end, and the command resumes."""
    return _driver_kill("driver_kill", seed, folder, address, "--address", address)


def private_kill(seed: int, folder: Path, address: str) -> Trial:
    """Kill the launcher of a private cluster, which ends with it; the command resumes."""
    return _driver_kill("private_kill", seed, folder, address)


def _driver_kill(name: str, seed: int, folder: Path, address: str, *words: str) -> Trial:
    draw, began, calm = random.Random(seed), time.monotonic(), undisturbed(folder, address)
    faults, home = [], folder / f"{name}-{seed}"
    with _started(home, *words) as run:
        moment = _wait_for_moment(home, run, draw)
        actors = [_parent(child) for child in _workers(home).values()]
        os.kill(run.process.pid, signal.SIGKILL)
        at = time.monotonic()
        with contextlib.suppress(TimeoutError):
            until(lambda: not _left(home) and not any(map(alive, actors)), GONE)
        down = time.monotonic() - at
        if (left := _left(home)) or any(map(alive, actors)):
            faults.append(f"left: {left}, {sum(map(alive, actors))} actors")
    with _started(home, *words, again=True) as run:
        if code := run.wait():
            faults.append(f"the resumed run ended with {code}: {run.words(20)}")
    summary = f"killed {moment}, nothing left after {down:.2f} s"
    return _trial(name, seed, began, home, faults, calm, summary)


def driver_signal(seed: int, folder: Path, address: str) -> Trial:
    """Signal the launcher at a random moment; it exits with 75, and the command resumes."""
    draw, began, calm = random.Random(seed), time.monotonic(), undisturbed(folder, address)
    faults, home = [], folder / f"driver_signal-{seed}"
    number = draw.choice((signal.SIGTERM, signal.SIGINT))
    words = ("--address", address)
    with _started(home, *words) as run:
        moment = _wait_for_moment(home, run, draw)
        os.kill(run.process.pid, number)
        at = time.monotonic()
        code, took = run.wait(), time.monotonic() - at
        # Before Ray has started a signal ends the launcher as it ends any program.
        expected = {STOPPED, DONE} if moment != "at the start" else {STOPPED, 130, -15, 143}
        if code not in expected:
            faults.append(f"exit code {code} after {took:.1f} s: {run.words(20)}")
        with contextlib.suppress(TimeoutError):
            until(lambda: not _left(home), GONE)
        if left := _left(home):
            faults.append(f"left: {left}")
    with _started(home, *words, again=True) as run:
        if again := run.wait():
            faults.append(f"the resumed run ended with {again}: {run.words(20)}")
    summary = f"{number.name} {moment}, exit code {code} in {took:.2f} s"
    return _trial("driver_signal", seed, began, home, faults, calm, summary)


_TRIALS = (child_kill, actor_kill, driver_kill, driver_signal, private_kill)
TRIALS = {each.__name__: each for each in _TRIALS}


class Undisturbed(NamedTuple):
    """An undisturbed run."""

    home: Path


def undisturbed(folder: Path, address: str) -> Undisturbed:
    """Return the undisturbed run of a folder."""
    home = folder / "calm"
    if not (home / "runs" / "hurt" / "checkpoints" / f"{STEPS}").exists():
        with _started(home, "--address", address) as run:
            if code := run.wait():
                raise RuntimeError(f"the undisturbed run ended with {code}: {run.words(20)}")
    return Undisturbed(home)


@contextlib.contextmanager
def _started(home: Path, *words: str, again: bool = False) -> Iterator[Run]:
    """Start the run of a folder by Ray; without an address, on a private cluster."""
    folder = home if again else home_of(home.parent, home.name)
    words = ("--engine", "ray", "--env", ",".join(SLOW), *(words or ("--address", "local")))
    with Run(folder, 2, words, {**SLOW, MARK: str(home)}) as run:
        yield run


def _wait_for_moment(home: Path, run: Run, draw: random.Random) -> str:
    """Wait for a random moment: one in four before the processes run."""
    if draw.randrange(4) == 0:
        time.sleep(draw.uniform(0.5, 10.0))
        return "at the start" if len(_workers(home)) < 2 else "while its processes start"
    return _wait_for_step(home, run, draw)


def _wait_for_step(home: Path, run: Run, draw: random.Random) -> str:
    """Wait for a random moment after the processes have started, before the run ends."""
    until(lambda: len(_workers(home)) == 2 or run.ended, STARTED)
    step, rows = draw.randrange(STEPS - 10), home / "runs" / "hurt" / "metrics.jsonl"
    if step:
        until(lambda: run.ended or _lines(rows) >= step, STARTED)
    time.sleep(draw.uniform(0, 0.2))
    if run.ended:
        raise TimeoutError(f"the run ended before the fault: {run.words(20)}")
    return f"after step {step}"


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _marked(home: Path) -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """Yield the running processes of a trial, and their environments."""
    mark = f"{MARK}={home}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if mark in words and alive(int(file.parent.name)):
                pairs = (word.partition(b"=") for word in words)
                yield int(file.parent.name), {name: value for name, _, value in pairs}


def _workers(home: Path) -> dict[int, int]:
    """Return the process ids of the actors' children by their index."""
    found = {}
    for pid, environ in _marked(home):
        if (index := environ.get(b"JTRAIN_PROCESS")) is not None and b"JTRAIN_PULSE" in environ:
            parent = Path(f"/proc/{_parent(pid)}/cmdline")
            with contextlib.suppress(OSError):
                if parent.read_bytes().startswith(b"ray::"):
                    found[int(index)] = pid
    return found


def _left(home: Path) -> list[str]:
    """Return the running processes of a trial, those of a shared cluster left out."""
    found = []
    for pid, _ in _marked(home):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [f"{words[:80]}" for words in found]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _trial(
    name: str,
    seed: int,
    began: float,
    home: Path,
    faults: list[str],
    calm: Undisturbed,
    summary: str,
) -> Trial:
    if not faults and (other := differences(home, calm.home)):
        faults = [f"different result: {other}"]
    detail = "; ".join([summary, *faults])
    return Trial(name, seed, not faults, time.monotonic() - began, detail)


class Cluster:
    """A running Ray cluster on this machine."""

    def __init__(self, address: str, folder: Path, stack: contextlib.ExitStack):
        self.address, self._folder, self._stack = address, folder, stack
        self.nodes: list[subprocess.Popen] = []

    def add_node(self, *words: str, cpus: int, version: str = "") -> subprocess.Popen:
        """Start a node, and return its process, which leads a group of its own.

        Args:
            words: further arguments of `ray start`.
            cpus: CPUs of the node.
            version: the version of Ray that the node claims to have; empty: its own.
        """
        claim = f"import ray; ray.__version__ = {version!r}; " if version else ""
        log = self._folder / f"log-{len(self.nodes)}"
        common = [f"--num-cpus={cpus}", "--object-store-memory=100000000", "--block"]
        with log.open("w") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", f"{claim}from ray.scripts.scripts import main; main()"),
                    *("start", *words, *common),
                ],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.nodes.append(process)
        self._stack.callback(_end_node, process)
        until(lambda: "Ray runtime started" in log.read_text(), STARTED)
        return process


@contextlib.contextmanager
def shared_cluster(cpus: int = 4, *, version: str = "") -> Iterator[Cluster]:
    """Run a Ray cluster on this machine.

    Args:
        cpus: CPUs of its head node.
        version: the version of Ray that it claims to have; empty: its own.
    """
    port, before = free_port(), {name: os.environ.get(name) for name in (*OWN, "XLA_FLAGS")}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        (folder / "token").write_text("0" * 64)
        os.environ.pop("XLA_FLAGS", None)
        os.environ.update(OWN | {"RAY_AUTH_TOKEN_PATH": f"{folder}/token"})
        try:
            cluster = Cluster(f"127.0.0.1:{port}", folder, stack)
            head = ["--head", f"--port={port}", "--include-dashboard=false"]
            cluster.add_node(*head, f"--temp-dir={folder}", cpus=cpus, version=version)
            yield cluster
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


# XLA_FLAGS is removed: a test process of 8 CPU devices has it.
OWN = {
    "JAX_PLATFORMS": "cpu",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": "",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def _folder() -> tempfile.TemporaryDirectory:
    # Ray's sockets are in it: their paths may have 107 letters.
    return tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)


def _end_node(process: subprocess.Popen) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials and print a line for each, and a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.ray_launch", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(TRIALS), metavar="NAME")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("chaos-ray"))
    args = parser.parse_args(argv)
    folder, table, failed = args.folder.resolve(), [], False
    folder.mkdir(parents=True, exist_ok=True)
    with shared_cluster() as cluster:
        for name in args.only or TRIALS:
            trials = []
            for seed in range(args.seed, args.seed + args.trials):
                began = time.monotonic()
                try:
                    trial = TRIALS[name](seed, folder, cluster.address)
                except Exception as error:
                    trial = Trial(name, seed, False, time.monotonic() - began, f"{error!r}")
                trials.append(trial)
                sys.stdout.write(f"{trial}\n")
                sys.stdout.flush()
            seconds = statistics.median(trial.seconds for trial in trials)
            passed = sum(trial.passed for trial in trials)
            failed |= passed < len(trials)
            table.append(f"{name:14} {passed} of {len(trials)}, median {seconds:.1f} s a trial")
    sys.stdout.write("\n".join(table) + "\n")
    return (
        DONE
        if all(" of " in row and row.split()[1] == row.split()[3].rstrip(",") for row in table)
        else FAULT
    )


if __name__ == "__main__":
    sys.exit(main())
