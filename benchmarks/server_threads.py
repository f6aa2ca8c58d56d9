"""Threads in the place of processes, for tests, benchmarks and a debugger."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from jtrain.errors import STOPPED
from jtrain.parallel import Server
from jtrain.server.coordinator import Coordinator
from jtrain.server.engines import Role
from jtrain.server.plan import Plan
from jtrain.server.plan_checks import check_plan
from jtrain.server.process import serve, work
from jtrain.server.server_loop import coordinator_of
from jtrain.server.supervisor import Supervisor, open_cluster


class ThreadProcess:
    """A worker or a server in a thread; a kill takes a server away, and leaves a worker."""

    def __init__(self, role: Role, index: int, plan: Plan, environ: Mapping[str, str]):
        self.end, self.error = "", ""
        self.leaving = threading.Event()
        """Set to let a worker leave."""
        self._listener = serve(plan, index, environ)[0] if role == "shard" else None
        if role == "worker":
            arguments = plan, index, environ
            threading.Thread(target=self._work, args=arguments, daemon=True).start()

    def _work(self, plan: Plan, index: int, environ: Mapping[str, str]) -> None:
        try:
            if work(plan, index, environ, leaving=self.leaving) == STOPPED:
                self.end = f"exit code {STOPPED}"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}\n"
            self.end = "exit code 1"

    def output(self) -> str:
        """Return the error that ended it."""
        return self.error

    def kill(self) -> None:
        """Close the connections of a server."""
        if self._listener is not None:
            self._listener.close()
            self.end = self.end or "SIGKILL"


class ThreadEngine:
    """Engine of threads, which share the plan."""

    def __init__(self, plan: Plan, environ: Mapping[str, str]):
        self._plan, self._environ = plan, environ
        self.workers = plan.server.workers

    def hosts(self, server: Server) -> tuple[str, str]:
        """Return the address in the config: the loopback by default."""
        return server.host, server.host

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> ThreadProcess:
        """Start a thread."""
        return ThreadProcess(role, index, self._plan, {**environ, **self._environ})


@contextlib.contextmanager
def thread_cluster(
    plan: Plan, *, log: Callable[[str], None] = print, environ: Mapping[str, str] | None = None
) -> Iterator[tuple[Coordinator, Supervisor]]:
    """Start the workers and servers of a plan in threads, in a `with` block."""
    check_plan(plan)
    engine = ThreadEngine(plan, environ or {})
    with open_cluster(plan, engine, coordinator_of(plan), log) as (coordinator, supervisor):
        yield coordinator, supervisor
