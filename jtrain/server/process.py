"""Programs of workers and servers: of those that a run starts, and of those that join it.

`python -m jtrain.server.process worker 0 CONFIG` starts the first worker of a run. The run also
announces itself in its directory, so that workers on any machine find it. The file holds the
address of the run's own process and the run's token, so whoever may read it may take part in the
run: it is readable by its owner only, and removed when the run ends.

The tasks of a launcher are started by the same command, under Slurm by `srun`: the first is the
run's own process, then come the servers, then the workers.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jtrain.config.resolve import resolve
from jtrain.config.top import RUNS
from jtrain.distributed.cluster import Cluster, detect
from jtrain.distributed.cluster.cluster import CoordinatorAddress
from jtrain.errors import DONE, FAULT, STOPPED, ConfigError, PeerError, UserError
from jtrain.io.redact import redact
from jtrain.io.regular_files import atomic_write, read_json
from jtrain.parallel import Server
from jtrain.parallel.strategies.server_modes import AsyncDiLoCo, StreamingDiLoCo
from jtrain.server.client import Client, closing
from jtrain.server.listener import Listener, read_address
from jtrain.server.local_worker import AsyncDiLoCoWorker, LocalWorker, StreamingWorker
from jtrain.server.plan import Plan
from jtrain.server.shard import ShardService
from jtrain.server.wire import Message
from jtrain.server.worker import Worker
from jtrain.train.experiment import RunConfig
from jtrain.train.processes import code_facts
from jtrain.train.program import set_up
from jtrain.train.runtime import enable_compilation_cache

ADDRESS, TOKEN = "JTRAIN_SERVER_ADDRESS", "JTRAIN_SERVER_TOKEN"
STEP_DELAYS = "JTRAIN_SERVER_SLOW"  # of tests and benchmarks: slow workers
FILE, MOST = ".server.json", 1 << 16  # copies in an object store have no file with a dot
GONE = 5.0  # seconds without the run's own process
POLL = 0.5  # seconds between two looks for the run


def main(argv: Sequence[str]) -> int:
    """Work until the run ends; return the exit code."""
    role, index, config = argv[0], int(argv[1]), Path(argv[2])
    leaving = leave_on_signals() if role == "worker" else threading.Event()
    enable_compilation_cache()
    try:
        plan = Plan(set_up(resolve(config).config))
        if role == "worker":
            return work(plan, index, os.environ, leaving=leaving)
        return serve_until_end(plan, index, os.environ)
    except (UserError, PeerError) as error:
        sys.stderr.write(f"{redact(str(error))}\n")
        return FAULT


def leave_on_signals() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets; a second signal ends the process."""
    leaving = threading.Event()

    def leave(*_: object) -> None:
        set_handlers(signal.SIG_DFL)
        leaving.set()

    def set_handlers(handler: "signal.Handlers | Callable[..., None]") -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)

    set_handlers(leave)
    return leaving


def work(
    plan: Plan,
    index: int | None,
    environ: Mapping[str, str],
    *,
    leaving: threading.Event | None = None,
    facts: Mapping[str, str] | None = None,
) -> int:
    """Compute until the run ends; return the exit code: 0 it has ended, 75 `leaving` was set.

    Args:
        index: number among the processes that the run has started; None for one that joins.
        facts: about the code of this process; None: it is that of the run.
    """
    # A worker that has joined looks for the run's next process if this one is gone.
    patience = None if index is not None else min(GONE, plan.server.timeout)
    coordinator = _coordinator(plan, environ, patience)
    # By a connection of its own: the last request over the other one says whose it was.
    locator = _coordinator(plan, environ, patience)

    def locate(shard: int) -> tuple[str, int]:
        return read_address(shard, locator.call(Message("where", {"shard": shard})).fields)

    # A server may have to be started again.
    options = {"token": environ[TOKEN], "patience": plan.server.start_timeout, **plan.connection}
    shards = [
        Client(f"server {shard}", functools.partial(locate, shard), **options)
        for shard in range(plan.server.shards)
    ]
    with closing([coordinator, locator, *shards]):
        worker = _worker_of(plan)(
            plan,
            index,
            coordinator,
            shards,
            slow=_step_delay(index or 0, environ),
            leaving=leaving or threading.Event(),
            facts=facts,
        )
        return DONE if worker.run() else STOPPED


def _worker_of(plan: Plan) -> type[Worker]:
    match plan.server.mode:
        case StreamingDiLoCo():
            return StreamingWorker
        case AsyncDiLoCo():
            return AsyncDiLoCoWorker
    return LocalWorker if plan.is_local else Worker


def _step_delay(index: int, environ: Mapping[str, str]) -> float:
    """Return the seconds that each step of a worker waits: `0.1,0.5` for workers 0 and 1.

    A worker that has joined waits as worker 0 does.
    """
    seconds = environ.get(STEP_DELAYS, "").split(",")
    return float(seconds[index]) if index < len(seconds) and seconds[index] else 0.0


def serve(plan: Plan, index: int, environ: Mapping[str, str]) -> tuple[Listener, Message]:
    """Return a listener that holds a shard, and the message that waits for the run's end."""
    service = ShardService(plan)
    with closing([_coordinator(plan, environ)]) as (coordinator,):
        coordinator.call(Message("where", {"shard": index}))  # connect: local_host
        host = coordinator.local_host
        listener = Listener(service.handle, token=environ[TOKEN], host=host, **plan.connection)
        service.traffic = listener
        address = {"shard": index, "host": host, "port": listener.port, "pid": os.getpid()}
        coordinator.call(Message("register", address))
    return listener, Message("watch", address)


def serve_until_end(plan: Plan, index: int, environ: Mapping[str, str]) -> int:
    """Hold a shard until the run ends, or has another in its place; return the exit code.

    Raises:
        PeerError: if the run's own process is gone.
    """
    listener, watch = serve(plan, index, environ)
    coordinator = _coordinator(plan, environ, min(GONE, plan.server.timeout))
    with listener, closing([coordinator]):
        while coordinator.call(watch).name != "end":
            pass  # the run answers when it ends, or after a second
    return DONE


def _coordinator(plan: Plan, environ: Mapping[str, str], patience: float | None = None) -> Client:
    """Return a connection to the run's own process."""
    address = CoordinatorAddress.parse(environ[ADDRESS], ADDRESS)
    locate, token = lambda: (address.host, address.port), environ[TOKEN]
    return Client("the run", locate, token=token, patience=patience, **plan.connection)


def find_task(server: Server, cluster: Cluster) -> tuple[str, int]:
    """Return the role of this process of a cluster, `run`, `shard` or `worker`, and its number.

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
        return "run", 0
    if cluster.index <= shards:
        return "shard", cluster.index - 1
    return "worker", cluster.index - 1 - shards


def serve_as_task(
    config: RunConfig, environ: Mapping[str, str], log: Callable[[str], None]
) -> int | None:
    """Work as a server or a worker, where a launcher has started this process as one.

    Returns:
        The exit code; None if this process is the run's own.

    Raises:
        ConfigError: if a launcher has started several processes, and the run starts its own.
    """
    server, cluster = config.parallel, detect(environ)
    assert isinstance(server, Server), "another strategy has no such tasks"
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
    role, number = find_task(server, cluster)
    if role == "run":
        return None
    directory, wait = RUNS / config.run_name, server.start_timeout
    enable_compilation_cache()
    if role == "worker":
        return join(directory, wait=wait, leaving=leave_on_signals(), log=log)
    # The run needs a server for its last checkpoint, and ends it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve_once = lambda run: serve_until_end(Plan(set_up(read_config(directory))), number, run)
    return _follow_run(directory, serve_once, wait, threading.Event(), log)


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
    plan = functools.cache(lambda: Plan(set_up(read_config(directory))))

    def join_once(environ: Mapping[str, str]) -> int:
        log(f"joining {directory} at {environ[ADDRESS]}")
        facts = code_facts(plan().program.resolved.config)
        return work(plan(), None, environ, leaving=leaving, facts=facts)

    return _follow_run(directory, join_once, wait, leaving, log)


def _follow_run(
    directory: Path,
    attempt: Callable[[Mapping[str, str]], int],
    wait: float,
    leaving: threading.Event,
    log: Callable[[str], None],
) -> int:
    """Take part in a run, and in the next one where its process is gone; return the exit code."""
    gone: Mapping[str, str] | None = None  # the announcement of a process that is gone
    end = time.monotonic() + wait
    log(f"looking for the run in {directory}")
    while not leaving.is_set():
        environ = read_announcement(directory)
        if environ is None or environ == gone:
            if time.monotonic() > end:
                raise PeerError(
                    f"{directory / FILE} has named no running run for {wait:g} s. Start it: jtrain "
                    f"run {directory}/config.yaml; or wait longer for it by --wait"
                )
            leaving.wait(POLL)
            continue
        try:
            return attempt(environ)
        except (PeerError, ConfigError) as error:
            announced = read_announcement(directory)
            if isinstance(error, ConfigError) and announced == environ:
                raise
            if announced is None:  # the run has ended, and not failed
                return DONE
            gone, end = environ, time.monotonic() + wait
            log(f"{error}; waiting for the run to be started again")
    return STOPPED


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
