"""The program of a worker or a server: `python -m jtrain.server.process worker 0 CONFIG`."""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from jtrain.config.resolve import resolve
from jtrain.errors import DONE, FAULT, UserError
from jtrain.io.redact import redact
from jtrain.server.client import Client, closing
from jtrain.server.listener import Listener
from jtrain.server.server_plan import Plan, make_plan
from jtrain.server.shard_service import ShardService
from jtrain.server.worker import Worker
from jtrain.train.compilation_cache import enable_compilation_cache

PORTS, TOKEN, SLOW = "JTRAIN_SERVER_PORTS", "JTRAIN_SERVER_TOKEN", "JTRAIN_SERVER_SLOW"


def main(argv: Sequence[str]) -> int:
    """Work until the run ends; return the exit code."""
    role, index, config = argv[0], int(argv[1]), Path(argv[2])
    enable_compilation_cache()
    try:
        plan = make_plan(resolve(config).config)
        if role == "worker":
            work(plan, index, os.environ)
            return DONE
        with serve(plan, index, os.environ):
            threading.Event().wait()  # until this process is killed
    except UserError as error:
        sys.stderr.write(f"{redact(str(error))}\n")
        return FAULT
    return DONE


def work(plan: Plan, index: int, environ: Mapping[str, str]) -> None:
    """Compute until the run ends."""
    names = ["the run", *(f"server {shard}" for shard in range(plan.server.shards))]
    options = {"token": environ[TOKEN], "most": plan.most, "timeout": plan.server.timeout}
    numbers = ports(environ)
    clients = [Client(name, port, **options) for name, port in zip(names, numbers, strict=True)]
    with closing(clients):
        slow = _slow(index, environ)
        Worker(plan, index, clients[0], clients[1:], slow=slow).run()


def serve(plan: Plan, index: int, environ: Mapping[str, str]) -> Listener:
    """Return a listener that holds a shard until it is closed."""
    service = ShardService(plan, index)
    port, token = ports(environ)[1 + index], environ[TOKEN]
    listener = Listener(service.handle, token=token, most=plan.most, port=port)
    service.traffic = lambda: (listener.received, listener.sent)
    return listener


def ports(environ: Mapping[str, str]) -> list[int]:
    """Return the ports of the coordinator and of the shards."""
    return [int(port) for port in environ[PORTS].split(",")]


def _slow(index: int, environ: Mapping[str, str]) -> float:
    """Return the seconds that each step of a worker waits: `0.1,0.5` for workers 0 and 1."""
    seconds = environ.get(SLOW, "").split(",")
    return float(seconds[index]) if index < len(seconds) and seconds[index] else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
