"""Processes of a run that its launcher or a person starts: they find the run, and work for it.

The run announces itself in its directory, so that a worker on any machine finds it. The file holds
the address of the run's own process and the run's token, so whoever may read it may take part in
the run: it is readable by its owner only, and removed when the run ends.

The tasks of a launcher are started by the same command, under Slurm by `srun`: the first is the
run's own process, then come the servers, then the workers.
"""

import contextlib
import functools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from jtrain.config.resolve import resolve
from jtrain.config.top import RUNS
from jtrain.distributed.cluster import Cluster, detect
from jtrain.errors import DONE, STOPPED, ConfigError, PeerError
from jtrain.io.regular_files import atomic_write, read_json
from jtrain.parallel import Server
from jtrain.server.plan import make_plan
from jtrain.server.process import ADDRESS, TOKEN, leave_on_signals, serve_until_end, work
from jtrain.train.experiment import RunConfig
from jtrain.train.processes import code_facts
from jtrain.train.runtime import enable_compilation_cache


class Task(NamedTuple):
    """Part of a process in a run."""

    role: Literal["run", "shard", "worker"]
    number: int


def find_task(server: Server, cluster: Cluster) -> Task:
    """Return the part of this process of a cluster.

    Raises:
        ConfigError: if there are too few processes, or not the servers of the config.
    """
    shards, workers = server.shards, cluster.processes - 1 - server.shards
    if cluster.servers and cluster.servers != shards:
        raise ConfigError(
            f"{cluster.kind} has {cluster.servers} servers, and the config parallel.shards="
            f"{shards}. Set parallel.shards={cluster.servers}."
        )
    needed = server.needed_workers
    if workers < needed:
        raise ConfigError(
            f"{cluster.kind} started {cluster.processes} processes ({cluster.variables}): one for "
            f"the run itself and parallel.shards={shards} servers leave {max(workers, 0)} workers, "
            f"and {needed} are needed. Start {1 + shards + needed} processes, or set "
            f"parallel.workers and parallel.shards to smaller numbers."
        )
    if cluster.index == 0:
        return Task("run", 0)
    if cluster.index <= shards:
        return Task("shard", cluster.index - 1)
    return Task("worker", cluster.index - 1 - shards)


def take_part(
    config: RunConfig, environ: Mapping[str, str], log: Callable[[str], None]
) -> int | None:
    """Work as a server or a worker, where a launcher has started this process as one.

    Returns:
        The exit code; None if this process is the run's own.

    Raises:
        ConfigError: if a launcher has started several processes, and the run starts its own.
    """
    server = config.parallel
    if not isinstance(server, Server):
        return None
    cluster = detect(environ)
    if server.engine != "cluster":
        if cluster.processes > 1:
            raise ConfigError(
                f"{cluster.kind} started {cluster.processes} processes ({cluster.variables}), and "
                f"parallel.engine={server.engine} starts processes of its own. Set "
                f"parallel.engine=cluster to train in those of {cluster.kind}; or start one."
            )
        return None
    if cluster.processes == 1:
        raise ConfigError(
            f"parallel.engine=cluster needs the processes of a launcher, such as srun, and this is "
            f"one by itself. Start {1 + server.shards + server.workers} of them, or set "
            f"parallel.engine=local."
        )
    task = find_task(server, cluster)
    if task.role == "run":
        return None
    directory, wait = RUNS / config.run_name, server.start_timeout
    enable_compilation_cache()
    if task.role == "shard":
        # The run needs it for its last checkpoint, and ends it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return hold_shard(directory, task.number, wait=wait, log=log)
    leaving = threading.Event()
    leave_on_signals(leaving)
    return join(directory, wait=wait, leaving=leaving, log=log)


POLL = 0.5  # seconds between two looks for the run


def join(
    directory: Path, *, wait: float, leaving: threading.Event, log: Callable[[str], None]
) -> int:
    """Work for a run until it ends; return the exit code: 0 it has ended, 75 this worker has left.

    When the run's own process is gone, a new one is waited for.

    Args:
        directory: of the run, which this machine shares with that of the run.
        wait: seconds without the run's own process after which this one ends.
        leaving: set when this worker is to leave after its step.

    Raises:
        ConfigError: if the run has no parameter servers, or this machine has other code.
        PeerError: if the run's own process is not there for `wait` seconds.
    """
    plan = functools.cache(lambda: make_plan(read_config(directory)))

    def take_part(environ: Mapping[str, str]) -> int:
        log(f"joining {directory} at {environ[ADDRESS]}")
        facts = code_facts(plan().program.resolved.config)
        return DONE if work(plan(), None, environ, leaving=leaving, facts=facts) else STOPPED

    return _follow_run(directory, take_part, wait, leaving, log)


def hold_shard(directory: Path, index: int, *, wait: float, log: Callable[[str], None]) -> int:
    """Hold a shard of a run that a launcher has started beside it; return the exit code.

    Raises:
        PeerError: if the run's own process is not there for `wait` seconds.
    """
    hold = lambda environ: serve_until_end(make_plan(read_config(directory)), index, environ)
    return _follow_run(directory, hold, wait, threading.Event(), log)


def _follow_run(
    directory: Path,
    take_part: Callable[[Mapping[str, str]], int],
    wait: float,
    leaving: threading.Event,
    log: Callable[[str], None],
) -> int:
    """Take part in a run, and in the next one where its process is gone; return the exit code."""
    gone: Mapping[str, str] | None = None  # the announcement of a process that is gone
    while (environ := _find_run(directory, gone, wait, leaving, log)) is not None:
        try:
            return take_part(environ)
        except (PeerError, ConfigError) as error:
            announced = read_announcement(directory)
            if isinstance(error, ConfigError) and announced == environ:
                raise
            if announced is None:  # the run has ended, and not failed
                return DONE
            gone = environ
            log(f"{error}; waiting for the run to be started again")
    return STOPPED


def _find_run(
    directory: Path,
    gone: Mapping[str, str] | None,
    wait: float,
    leaving: threading.Event,
    log: Callable[[str], None],
) -> Mapping[str, str] | None:
    """Return the announcement of the run once it is there; None if `leaving` was set.

    Raises:
        PeerError: after `wait` seconds.
    """
    end, said = time.monotonic() + wait, False
    while not leaving.is_set():
        environ = read_announcement(directory)
        if environ is not None and environ != gone:
            return environ
        if time.monotonic() > end:
            raise PeerError(
                f"{directory / FILE} has named no running run for {wait:g} s. Start it: jtrain run "
                f"{directory}/config.yaml; or wait longer for it by --wait"
            )
        if not said:
            log(f"waiting for the run in {directory}")
            said = True
        leaving.wait(POLL)
    return None


def read_config(directory: Path) -> RunConfig:
    """Return the config of a run.

    Raises:
        ConfigError: if the run has no parameter servers.
    """
    config = resolve(directory / "config.yaml").config
    if not isinstance(config.parallel, Server):
        raise ConfigError(
            f"{directory} has parallel.kind={config.parallel.kind}, and workers join a run of "
            f"parallel.kind=server only. To train it: jtrain run {directory}/config.yaml"
        )
    return config


FILE, MOST = ".server.json", 1 << 16  # copies in an object store have no file with a dot


@contextlib.contextmanager
def announced(directory: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Announce the variables of a run in its directory, in a `with` block.

    The announcement of a run that fails stays, as that of one that is killed: workers that joined
    wait for the next start. Without it they end with the run.
    """
    path = directory / FILE
    atomic_write(path, json.dumps(dict(environ)).encode(), 0o600)
    yield
    if read_announcement(directory) == environ:  # not that of another start
        path.unlink(missing_ok=True)


def read_announcement(directory: Path) -> dict[str, str] | None:
    """Return the variables that a run has announced; None if it is not there."""
    try:
        found = read_json(directory / FILE, most=MOST, inside=directory)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {ADDRESS, TOKEN} <= found.keys() else None
