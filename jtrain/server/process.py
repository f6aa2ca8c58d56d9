"""The program of a worker or a server.

`python -m jtrain.server.process worker 0 CONFIG` starts the first worker of a run.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from jtrain.config.resolve import resolve
from jtrain.distributed.cluster.cluster import CoordinatorAddress
from jtrain.errors import DONE, FAULT, STOPPED, PeerError, UserError
from jtrain.io.redact import redact
from jtrain.parallel.strategies.server_modes import AsyncDiLoCo, StreamingDiLoCo
from jtrain.server.client import Client, closing
from jtrain.server.listener import Listener
from jtrain.server.local_worker import AsyncDiLoCoWorker, LocalWorker, StreamingWorker
from jtrain.server.plan import Plan, make_plan
from jtrain.server.registry import Address, register, remote_locate, watch
from jtrain.server.shard_service import ShardService
from jtrain.server.worker import Worker
from jtrain.train.runtime import enable_compilation_cache

ADDRESS, TOKEN, SLOW = "JTRAIN_SERVER_ADDRESS", "JTRAIN_SERVER_TOKEN", "JTRAIN_SERVER_SLOW"

GONE = 5.0  # seconds without the run's own process


def main(argv: Sequence[str]) -> int:
    """Work until the run ends; return the exit code."""
    role, index, config = argv[0], int(argv[1]), Path(argv[2])
    leaving = threading.Event()
    if role == "worker":
        leave_on_signals(leaving)
    enable_compilation_cache()
    try:
        plan = make_plan(resolve(config).config)
        if role == "worker":
            return DONE if work(plan, index, os.environ, leaving=leaving) else STOPPED
        return serve_until_end(plan, index, os.environ)
    except (UserError, PeerError) as error:
        sys.stderr.write(f"{redact(str(error))}\n")
        return FAULT


def leave_on_signals(leaving: threading.Event) -> None:
    """Leave the run after the step at SIGTERM or SIGINT; a second signal ends the process."""

    def leave(number: int, frame: object) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        leaving.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def work(
    plan: Plan,
    index: int | None,
    environ: Mapping[str, str],
    *,
    leaving: threading.Event | None = None,
    facts: Mapping[str, str] | None = None,
) -> bool:
    """Compute until the run ends; return False if `leaving` was set before.

    Args:
        index: number among the processes that the run has started; None for one that joins.
        facts: about the code of this process; None: it is that of the run.
    """
    # A worker that has joined looks for the run's next process if this one is gone.
    patience = None if index is not None else min(GONE, plan.server.timeout)
    coordinator = coordinator_client(plan, environ, patience=patience)
    # By a connection of its own: the last request over the other one says whose it was.
    locator = coordinator_client(plan, environ, patience=patience)
    options = {"token": environ[TOKEN], "most": plan.most, "timeout": plan.server.timeout}
    options["patience"] = plan.server.start_timeout  # a server may have to be started again
    shards = [
        Client(f"server {shard}", remote_locate(locator, shard), **options)
        for shard in range(plan.server.shards)
    ]
    with closing([coordinator, locator, *shards]):
        slow = _slow(index or 0, environ)
        options = {"slow": slow, "leaving": leaving, "facts": facts}
        return worker_of(plan)(plan, index, coordinator, shards, **options).run()


def worker_of(plan: Plan) -> type[Worker]:
    """Return the worker of a mode."""
    if isinstance(plan.server.mode, StreamingDiLoCo):
        return StreamingWorker
    if isinstance(plan.server.mode, AsyncDiLoCo):
        return AsyncDiLoCoWorker
    return LocalWorker if plan.is_local else Worker


def serve(plan: Plan, index: int, environ: Mapping[str, str]) -> Listener | None:
    """Return a listener that holds a shard until it is closed; None if the run has ended.

    Where another process holds the shard, this one stands by.
    """
    service = ShardService(plan, index)
    limits = {"most": plan.most, "timeout": plan.server.timeout}
    with closing([coordinator_client(plan, environ)]) as (coordinator,):
        host = coordinator.local_host()
        listener = Listener(service.handle, token=environ[TOKEN], host=host, **limits)
        service.traffic = lambda: listener.traffic("push", "pull")
        with contextlib.ExitStack() as stack:
            stack.enter_context(listener)
            if register(coordinator, index, Address(host, listener.port)):
                stack.pop_all()
                return listener
    return None


def serve_until_end(plan: Plan, index: int, environ: Mapping[str, str]) -> int:
    """Hold a shard until the run ends; return the exit code.

    Raises:
        PeerError: if the run's own process is gone.
    """
    listener = serve(plan, index, environ)
    if listener is None:
        return DONE
    with listener:
        coordinator = coordinator_client(plan, environ, patience=1.0)
        with closing([coordinator]):
            address = Address(coordinator.local_host(), listener.port)
            if watch(coordinator, index, address, plan.server.timeout):
                return DONE
    raise PeerError(f"the run has not answered for {plan.server.timeout:g} s")


def coordinator_client(
    plan: Plan, environ: Mapping[str, str], *, patience: float | None = None
) -> Client:
    """Return a connection to the run's own process."""
    address = CoordinatorAddress.parse(environ[ADDRESS], ADDRESS)
    return Client(
        "the run",
        lambda: (address.host, address.port),
        token=environ[TOKEN],
        most=plan.most,
        timeout=plan.server.timeout,
        patience=patience,
    )


def _slow(index: int, environ: Mapping[str, str]) -> float:
    """Return the seconds that each step of a worker waits: `0.1,0.5` for workers 0 and 1."""
    seconds = environ.get(SLOW, "").split(",")
    return float(seconds[index]) if index < len(seconds) and seconds[index] else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
