"""Trials under Slurm: one task of two is killed, or all are asked to end, at random moments."""

import atexit
import contextlib
import functools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.launched import CODE, differences, home_of
from chaos.slurm.cluster import ENDED, SlurmCluster, running_cluster
from chaos.slurm.packages import PACKAGES_FOLDER
from chaos.slurm.recipe import recipe
from chaos.trial import Trial
from jtrain.checkpoint.layout import read_record
from jtrain.errors import STOPPED
from jtrain.train.run_dir import RunDir

RUN = "hurt"
CONFIG = f"configs/{RUN}.yaml name={RUN} parallel.kind=mirrored"
PATIENCE = 400.0  # seconds for a job and its second life
# A state of 12 MB, of which every step is saved: a save is nearly always under way.
LARGE = CODE.replace('{"slope"', '{"much": jnp.zeros(1_000_000), "slope"').replace(
    " + noise", ' + noise + params["much"].mean()'
)
SAVING = f"{CONFIG} steps=100000 evaluate.every=0 checkpoint.every=1 checkpoint.keep=2"


def slurm_kill(seed: int, folder: Path) -> Trial:
    """Kill one task of two at a random moment; the published script requeues, to the same end.

    The moment is counted from the start, or for even seeds from the first row of metrics.
    """
    draw, began, faults = random.Random(seed), time.monotonic(), []
    cluster, calm = _cluster(folder), _calm(folder)
    longest = float((calm / "seconds").read_text()) if seed % 2 else 4.0
    victim = draw.randrange(2)
    for sooner in (1.0, 0.5, 0.25, 0.125):
        moment = draw.uniform(0.0, sooner * longest)
        with _job(cluster, home := home_of(folder, f"slurm_kill-{seed}"), CONFIG) as number:
            process = _process_of(cluster, number, victim)
            if not seed % 2:
                _until(lambda home=home, process=process: _rows(home) or not process.exists(), 0.01)
            time.sleep(moment)
            if not process.exists():
                continue
            steps = _rows(home)
            os.kill(int(process.name), signal.SIGKILL)
            job = cluster.wait(number, PATIENCE)
            if job.code or job.state != "COMPLETED" or job.restarts != 1:
                faults.append(f"{job.state}, exit code {job.code}, {job.restarts} restarts")
            elif other := differences(home, calm):
                faults.append(f"different result: {other}")
            break
    else:
        raise TimeoutError(f"{home}: each run ended before the kill")
    since = "the start" if seed % 2 else "the first row"
    summary = f"task {victim} killed {moment:.2f} s after {since}, with {steps} rows"
    return _trial("slurm_kill", seed, began, home, faults, summary)


def slurm_stop(seed: int, folder: Path) -> Trial:
    """Ask a job that saves all the time to end, by scancel or its time limit: sealed, exit 75."""
    draw, began, faults = random.Random(seed), time.monotonic(), []
    cluster, home = _cluster(folder), home_of(folder, f"slurm_stop-{seed}")
    (home / "experiments" / f"{RUN}.py").write_text(LARGE)
    how = ("scancel", "time limit")[seed % 2]
    limit = "00:10:00" if how == "scancel" else "00:02:00"  # the signal comes up to 60 s early
    with _job(cluster, home, SAVING, time=limit, signal="TERM@20") as number:
        rows = draw.randrange(3, 30)
        if how == "scancel":
            _until(lambda: _ended(cluster, number) or (_rows(home) >= rows and _saving(home)), 0.01)
            cluster.command("scancel", "--signal=TERM", f"{number}")
        _until(lambda: _ended(cluster, number), 0.1)
        if not cluster.job(number).restarts:
            faults.append("it was not requeued")
        cluster.command("scancel", f"{number}", check=False)
        said = (home / f"slurm-{number}.out").read_text()
    codes = sorted(re.findall(r"task (\d): Exited with exit code (\d+)", said))
    if codes != [("0", f"{STOPPED}"), ("1", f"{STOPPED}")]:
        faults.append(f"exit codes {codes}: {said[-500:]}")
    facts = RunDir(home / "runs" / RUN).facts()
    step = facts.get("step", 0)
    folder_of_step = home / "runs" / RUN / "checkpoints" / f"{step}"
    if facts.get("status") != "stopped" or not (folder_of_step / "seal.json").exists():
        faults.append(f"not sealed: {facts}")
    else:
        read_record(folder_of_step.parent, step)
    return _trial("slurm_stop", seed, began, home, faults, f"{how}, stopped at step {step}")


@functools.cache
def _cluster(folder: Path) -> SlurmCluster:
    """Return the cluster of all trials of this process; it ends with the process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))
    packages = Path(os.environ.get(PACKAGES_FOLDER, folder))
    return stack.enter_context(running_cluster(packages, Path(scratch) / "cluster"))


def _calm(folder: Path) -> Path:
    """Return the folder of the undisturbed run; it is run twice, and the second is timed."""
    home = folder / "slurm-calm"
    while not (home / "seconds").exists():
        warm = (home / "runs").exists()
        with _job(_cluster(folder), home_of(folder, home.name), CONFIG) as number:
            began = time.monotonic()
            job = _cluster(folder).wait(number, PATIENCE)
            if job.code:
                raise RuntimeError(f"the undisturbed run ended with {job.code}")
            if warm:
                (home / "seconds").write_text(f"{time.monotonic() - began}")
    return home


@contextlib.contextmanager
def _job(cluster: SlurmCluster, home: Path, command: str, **options: str) -> Iterator[int]:
    """Submit the published script for another run on two nodes; cancel it at the end."""
    values = {"nodes": "2", "gpus_per_node": "", "time": "00:20:00", **options}
    (home / "job.sh").write_text(recipe(command, RUN, **values))
    environ = {"READ": "0.02 0.02", "COMPILE": "0", "JAX_PLATFORMS": "cpu"}
    environ["JAX_COMPILATION_CACHE_DIR"] = f"{home.parent / 'compiled'}"
    number = cluster.submit(home / "job.sh", cwd=home, environ=environ)
    try:
        yield number
    finally:
        cluster.command("scancel", f"{number}", check=False)


def _process_of(cluster: SlurmCluster, number: int, task: int) -> Path:
    """Return the folder in /proc of a task, once it has started."""
    words, found = f"run configs/{RUN}.yaml", {}

    def started() -> bool:
        found.update(cluster.tasks(words, number))
        return task in found

    _until(started, 0.01)
    return Path(f"/proc/{found[task]}")


def _ended(cluster: SlurmCluster, number: int) -> bool:
    """Return whether the first life of a job has ended."""
    job = cluster.job(number)
    return job.state in ENDED or job.restarts > 0


def _until(condition: Callable[[], object], pause: float) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not after {PATIENCE:.0f} s")
        time.sleep(pause)


def _rows(home: Path) -> int:
    file = home / "runs" / RUN / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def _saving(home: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((home / "runs" / RUN / "checkpoints").glob("*.saving"))


def _trial(
    name: str, seed: int, began: float, home: Path, faults: list[str], summary: str
) -> Trial:
    if not faults:
        shutil.rmtree(home)
    return Trial(name, seed, not faults, time.monotonic() - began, "; ".join([summary, *faults]))
