"""Small runs in processes of their own, with faults in their data, and their results."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from jtrain.checkpoint.inspect import read_arrays
from jtrain.checkpoint.layout import read_record

STEPS = 60
CODE = '''
"""A line to fit; FAULT says what goes wrong in which process after which step, once.

READ says how many seconds a batch takes, at least and at most; COMPILE, how many the step.
"""

import os
import random
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled
from jtrain.distributed.heartbeat import HEARTBEAT


class Hurt(Arrays):
    def __getitem__(self, indices):
        time.sleep(random.uniform(*map(float, os.environ["READ"].split())))
        fault, process, step, mark = os.environ.get("FAULT", "none 0 0 /").split()
        here = process == os.environ.get("JTRAIN_PROCESS", "0") and fault != "none"
        if here and HEARTBEAT.now().step >= int(step) and not os.path.exists(mark):
            open(mark, "w").close()
            FAULTS[fault](mark)
        return super().__getitem__(indices)


def raises(mark):
    raise RuntimeError("hurt on purpose")


def sleeps(mark):
    time.sleep(600)


def deadlocks(mark):
    lock = threading.Lock()
    with lock:
        lock.acquire()


def reads(mark):
    os.mkfifo(mark + ".fifo")
    open(mark + ".fifo").read()


def stopped(mark):
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(mark):
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {f.__name__: f for f in (raises, sleeps, deadlocks, reads, stopped, killed)}


compiling = [float(os.environ["COMPILE"])]


def points(rows, seed, kind):
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return kind(x=x, y=x @ np.float32([1, -2, 3, 0.5]))


@jt.configclass
class Config(jt.RunConfig):
    """A line."""

    def build(self, place):
        def loss(params, batch, rng):
            if HEARTBEAT.now().phase == "compile" and compiling:
                time.sleep(compiling.pop())
            noise = 0 if rng is None else jnp.float32(0.1)
            heights = batch["x"] @ params["slope"] + params["offset"] + noise
            return jt.Mean.of((heights - batch["y"]) ** 2, batch["mask"])

        return jt.Experiment(
            init=lambda key: ({"slope": jnp.ones(4), "offset": jnp.float32(0)}, ()),
            loss=loss,
            train=Shuffled(points(200, 0, Hurt), size=self.batch, seed=self.seed),
            valid=InOrder(points(64, 1, Arrays), size=self.batch),
            optimizer=self.optimizer,
        )
'''
YAML = f"""\
experiment: hurt
steps: {STEPS}
batch: 16
optimizer: {{kind: adamw, lr: 1e-2}}
evaluate: {{every: 5}}
checkpoint: {{every: 5}}
log: {{every: 1}}
"""


class Command:
    """A command in a process; in a `with` block, after which the process is gone."""

    process: subprocess.Popen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def ended(self) -> bool:
        """True once the process ended."""
        return self.process.poll() is not None


class Run(Command):
    """A run under faults, by one process or several."""

    def __init__(
        self, home: Path, processes: int, words: Sequence[str], environment: Mapping[str, str]
    ):
        launch = ["launch", "--processes", f"{processes}", *words] if processes > 1 else []
        kind = "parallel.kind=" + ("mirrored" if processes > 1 else "single")
        self.home, self._said, self._began = home, home / "said.txt", time.monotonic()
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jtrain", *launch, "run", "configs/hurt.yaml", kind],
                cwd=home,
                env=_environment(home.parent, environment),
                stdout=said,
                stderr=said,
            )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def wait(self, seconds: float = 300.0) -> int:
        """Return the exit code; raise TimeoutExpired after `seconds`."""
        return self.process.wait(timeout=seconds)

    def words(self, lines: int = 5) -> str:
        """Return the last lines of its output."""
        return "\n".join(self._said.read_text().splitlines()[-lines:])

    def workers(self) -> dict[int, int]:
        """Return the process ids of the running workers by their index."""
        return dict(_children(self.process.pid))

    def next_step(self, at: float) -> float | None:
        """Return the seconds from `at` until restarted processes wrote a row."""
        rows, last = self.home / "runs" / "hurt" / "metrics.jsonl", 10**9
        while not self.ended and time.monotonic() - at < 100:
            size = rows.stat().st_size if rows.exists() else 0
            if size > last:
                return time.monotonic() - at
            last = min(size, last) if self.workers() else last
            time.sleep(0.01)
        return None


class Calm:
    """An undisturbed run."""

    def __init__(self, home: Path, seconds: float):
        self.home, self.seconds = home, seconds


def start_run(
    home: Path,
    processes: int,
    *words: str,
    fault: str = "none 0 0 /",
    read: tuple[float, float] = (0.02, 0.02),
    compiling: float = 0.0,
) -> Run:
    """Start the run of a folder in several processes.

    Args:
        words: options of `jtrain launch`.
        fault: KIND PROCESS STEP FILE.
        read: minimum and maximum of the seconds per batch.
        compiling: seconds added to the compilation of the step.
    """
    slow = {"READ": f"{read[0]} {read[1]}", "COMPILE": f"{compiling}"}
    return Run(home, processes, words, {"FAULT": fault, **slow})


def calm_run(folder: Path, processes: int) -> Calm:
    """Return the undisturbed run; it is run twice, and the second, with a cache, is timed."""
    home, known = folder / f"calm-{processes}", folder / f"calm-{processes}.seconds"
    while not known.exists():
        warm = home.exists() and (home / "runs").exists()
        home = home_of(folder, home.name)
        began = time.monotonic()
        with start_run(home, processes) as run:
            if code := run.wait():
                raise RuntimeError(f"the undisturbed run ended with {code}: {run.words(20)}")
        if warm:
            known.write_text(f"{time.monotonic() - began}")
    return Calm(home, float(known.read_text()))


def home_of(folder: Path, name: str) -> Path:
    """Create a folder with the study; files of an earlier trial are deleted."""
    home = folder / name
    shutil.rmtree(home, ignore_errors=True)
    (home / "experiments").mkdir(parents=True)
    (home / "configs").mkdir()
    (home / "experiments" / "hurt.py").write_text(CODE)
    (home / "configs" / "hurt.yaml").write_text(YAML)
    return home


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("JTRAIN_")}
    known.pop("XLA_FLAGS", None)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PLATFORMS": "cpu"}
    return {**known, **cache, **more}


def differences(one: Path, other: Path) -> str:
    """Return the differences between two runs; empty if all bits are equal."""
    (rows, state), (rows_there, state_there) = _result(one), _result(other)
    if rows != rows_there:
        return f"{one}/runs/hurt/metrics.jsonl"
    wrong = [n for n in {*state, *state_there} if state.get(n) != state_there.get(n)]
    return ", ".join(sorted(wrong))


def _result(home: Path) -> tuple[bytes, dict[str, bytes]]:
    run = home / "runs" / "hurt"
    names = list(read_record(run / "checkpoints", STEPS)["fingerprints"])
    found = read_arrays(run / "checkpoints", STEPS, names)
    leaves = {name: array.tobytes() for name, array in found.items()}
    return (run / "metrics.jsonl").read_bytes(), leaves


def _children(parent: int) -> Iterator[tuple[int, int]]:
    """Yield the index and the process id of each worker that `parent` started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, found = stat.read_text().rpartition(")")[2].split()[:2]
            environ = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:  # ended in the meantime
            continue
        if int(found) == parent and state != "Z":
            for variable in environ:
                if variable.startswith(b"JTRAIN_PROCESS="):
                    yield int(variable.partition(b"=")[2]), int(stat.parent.name)


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition; raise TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not become true")
        time.sleep(0.005)
