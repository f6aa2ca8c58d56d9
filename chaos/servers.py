"""Kills in runs on parameter servers: of workers, of servers, and of the run's own process.

The gradient of the parameters `count` is 16 in every step and the learning rate is 1/16, so that
each update lowers them by 1: their values are the number of updates of the server that holds them.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from chaos.launched import CODE, STEPS, Command, alive, differences, home_of, until
from chaos.trial import Trial
from jtrain.checkpoint.inspect import read_arrays
from jtrain.checkpoint.layout import read_record
from jtrain.server.partition import make_partition

KILLS = 6  # in a trial
EXACT = {
    "sync": "{kind: sync}",
    "local_sgd": "{kind: local_sgd, inner_steps: 5}",
    "diloco": "{kind: diloco, inner_steps: 5}",
}
PACED = {"async": "{kind: async}", "ssp": "{kind: ssp, bound: 1}"}
MODES = {**EXACT, **PACED}  # a trial has the mode of its seed
SERVERS = 2
SERVER = f"parallel={{kind: server, workers: 2, shards: {SERVERS}, restarts: 100, mode: %s}}"
COUNTED = CODE.replace('{"slope"', '{"count": jnp.zeros(64), "slope"').replace(
    "(heights - batch[", '16 * params["count"].sum() + (heights - batch['
)
YAML = f"""\
experiment: hurt
steps: {STEPS}
batch: 16
optimizer: {{kind: sgd, lr: 0.0625}}
evaluate: {{every: 10}}
checkpoint: {{every: 10}}
log: {{every: 1}}
"""
MARK = "JTRAIN_TRIAL"  # in the environment of all processes of a trial
GONE = 30.0  # seconds after which no process may be left
STARTED = 200.0  # seconds for processes to start, and for a step, on a busy machine


def server_worker_kill(seed: int, folder: Path) -> Trial:
    """Kill workers at random moments."""
    return _trial("server_worker_kill", seed, folder, lambda run, draw: run.kill(draw, "worker"))


def server_kill(seed: int, folder: Path) -> Trial:
    """Kill servers at random moments."""
    return _trial("server_kill", seed, folder, lambda run, draw: run.kill(draw, "shard"))


def server_run_kill(seed: int, folder: Path) -> Trial:
    """Kill the run's own process; the same command, or its launcher, starts it again."""
    return _trial("server_run_kill", seed, folder, lambda run, draw: run.kill_run())


class _Run(Command):
    """A run of a folder, in a `with` block.

    Args:
        launched: start it by `jtrain launch`, which starts it again after a kill.
    """

    def __init__(self, home: Path, mode: str, *, launched: bool = False):
        self.home, self._mode, self._launched = home, mode, launched
        self.said = home / "said.txt"
        self.start()

    def start(self) -> None:
        """Start the command."""
        launch = ["launch", "--processes", "1", "--restarts", "100"] if self._launched else []
        # Paced workers go on while one is started again: steps that are long enough for all kills.
        read = "0.3 0.3" if self._mode in PACED else "0.03 0.03"
        environ = {"FAULT": "none 0 0 /", "READ": read, "COMPILE": "0", MARK: str(self.home)}
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.home.parent / "compiled")}
        known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        known |= {"JAX_PLATFORMS": "cpu", **cache, **environ}
        values = ["run", "configs/hurt.yaml", SERVER % MODES[self._mode]]
        with self.said.open("a") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jtrain", *launch, *values],
                cwd=self.home,
                env=known,
                stdout=said,
                stderr=said,
            )

    def rows(self) -> list[int]:
        """Return the steps in metrics.jsonl."""
        path = self.home / "runs" / "hurt" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            return [row["step"] for row in map(json.loads, lines) if "loss" in row]
        return self.rows()

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is in metrics.jsonl."""
        until(lambda: self.ended or max(self.rows(), default=0) >= step, STARTED)

    def kill(self, draw: random.Random, role: str) -> str:
        """Kill a worker or a server that runs."""
        until(lambda: self.ended or bool(self.processes(role)), STARTED)
        index, pid = draw.choice(sorted(self.processes(role).items()))
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid), GONE)
        return f"{index}"

    def kill_run(self) -> str:
        """Kill the run's own process, and start it again unless its launcher does."""
        if self._launched:
            until(lambda: self.ended or bool(self.processes("run")), STARTED)
            (pid,) = self.processes("run").values()
        else:
            pid = self.process.pid
        before = self.processes("worker") | self.processes("shard")
        os.kill(pid, signal.SIGKILL)
        if not self._launched:
            self.process.wait()
        until(lambda: not any(map(alive, before.values())), GONE)
        if not self._launched:
            self.start()
        return "launched" if self._launched else "again"

    def processes(self, role: str) -> dict[str, int]:
        """Return the process ids of a role by the index; of role `run`, the launcher's child."""
        found = {}
        for pid, words in _marked(self.home):
            if words[1:4] == ["-m", "jtrain.server.process", role]:
                found[words[4]] = pid
            elif role == "run" and "jtrain" in words and "run" in words and "launch" not in words:
                found["run"] = pid
        return found


def _marked(home: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the running processes of a trial, and their commands."""
    mark = f"{MARK}={home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if mark in (folder / "environ").read_bytes().split(b"\0") and alive(pid):
                yield pid, (folder / "cmdline").read_bytes().decode().split("\0")


def _trial(name: str, seed: int, folder: Path, kill: Callable[[_Run, random.Random], str]) -> Trial:
    draw, began = random.Random(f"{name} {seed}"), time.monotonic()
    mode = list(MODES)[seed % len(MODES)]
    calm = _undisturbed(folder.parent / "server_calm", mode)
    home, killed = _home(folder, f"{name}-{seed}"), []
    steps = sorted(draw.randrange(STEPS - 10) for _ in range(KILLS))
    if seed % 3 == 0:
        steps[0] = -1  # while its processes start
    with _Run(home, mode, launched=name == "server_run_kill" and seed % 2 == 1) as run:
        for step in steps:
            if step >= 0:
                run.wait_for_step(step)
            time.sleep(draw.uniform(0, 0.2) if step >= 0 else draw.uniform(0.5, 5.0))
            if run.ended:
                break
            killed.append(f"{kill(run, draw)} at {max(run.rows(), default=0)}")
        code = run.process.wait(timeout=STARTED)
        faults = _faults(run, mode, code, calm)
    with contextlib.suppress(TimeoutError):
        until(lambda: not list(_marked(home)), GONE)
    if left := [words for _, words in _marked(home)]:
        faults.append(f"left: {left}")
    if len(killed) < KILLS:
        faults.append(f"only {len(killed)} kills")
    detail = "; ".join([f"{mode}, killed {', '.join(killed)}", *faults])
    return Trial(name, seed, not faults, time.monotonic() - began, detail)


def _faults(run: _Run, mode: str, code: int, calm: Path) -> list[str]:
    """Return what is wrong with the result of a run."""
    said = run.said.read_text()
    if code:
        return [f"exit code {code}: {said[-500:]}"]
    if run.rows() != list(range(1, STEPS + 1)):
        return [f"steps {run.rows()}"]
    if mode in EXACT:
        other = differences(run.home, calm)
        return [f"different result: {other}"] if other else []
    lost = [0] * SERVERS
    for server, updates in re.findall(r"server (\d+) has lost (\d+) updates", said):
        lost[int(server)] += int(updates)
    counts, expected = _counts(run.home), [STEPS - each for each in lost]
    return [] if counts == expected else [f"{counts} updates in the servers, not {expected}"]


def _counts(home: Path) -> list[float]:
    """Return the number of updates in the parameters of each server."""
    checkpoints = home / "runs" / "hurt" / "checkpoints"
    names = [n for n in read_record(checkpoints, STEPS)["fingerprints"] if n.startswith("params/")]
    params = {
        name.removeprefix("params/"): np.asarray(array)
        for name, array in read_arrays(checkpoints, STEPS, names).items()
    }
    found = []
    partition = make_partition(params, SERVERS)
    for server in range(SERVERS):
        values = np.unique(partition.of_params(params, server)["count"])
        assert len(values) == 1, f"one number of updates in all rows, and not {values}"
        found.append(-float(values[0]))
    return found


def _undisturbed(folder: Path, mode: str) -> Path:
    """Return the folder of a run that ends by itself."""
    home = folder / mode
    if not (home / "runs" / "hurt" / "checkpoints" / f"{STEPS}" / "seal.json").exists():
        with _Run(_home(folder, mode), mode) as run:
            if code := run.process.wait(timeout=STARTED):
                raise RuntimeError(f"the undisturbed run ended with {code}: {run.said.read_text()}")
    return home


def _home(folder: Path, name: str) -> Path:
    home = home_of(folder, name)
    (home / "experiments" / "hurt.py").write_text(COUNTED)
    (home / "configs" / "hurt.yaml").write_text(YAML)
    return home
