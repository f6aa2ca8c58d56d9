"""Gang: the Ray actors of one attempt, placed together, and their processes."""

import collections
import contextlib
import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtrain.distributed.heartbeat import Beat, Heartbeat
from jtrain.distributed.launcher.port import LOOPBACK
from jtrain.distributed.launcher.ray.cluster import cluster_nodes, first_sentence, import_ray
from jtrain.distributed.launcher.ray.node_worker import NodeWorker, Report
from jtrain.distributed.launcher.ray.placement import (
    Host,
    Resources,
    describe_nodes,
    format_resources,
    order,
    room,
)
from jtrain.distributed.launcher.supervise import StoppedBeforeStartError
from jtrain.distributed.launcher.worker import Worker
from jtrain.errors import PeerError, UserError

POLL = 0.05  # seconds between two looks for reports
STARTING = 120.0  # seconds for all actors to start, once they are placed
KILLING = 10.0  # seconds for an actor to end its process; then the actor is killed
THREADS = 4  # of an actor: one waits for news
_NO_BEAT = Heartbeat().now()


class RayWorker(Worker):
    """A process on a node of the cluster, as its actor last reported it."""

    def __init__(self, index: int, actor: Any, host: Host):
        super().__init__(index)
        self.actor, self.host = actor, host
        self.requests: collections.deque[Callable[[], object]] = collections.deque()
        """Calls to the actor; the gang's thread makes them, since a signal handler must not."""
        self.last = threading.Event()
        """Set once no report comes any more."""
        self._report: Report | None = None
        self._offset = float("inf")  # of this machine's clock to the actor's
        self._code: int | None = None
        self._lost = False

    @property
    def code(self) -> int | None:
        """Exit code, the negative number of a signal; None while it runs."""
        return self._code if self.ended else None

    @property
    def stopped(self) -> bool:
        """True if a signal such as SIGSTOP has stopped it."""
        return self._report is not None and self._report.stopped

    @property
    def exit_reason(self) -> str:
        """Reason of its end."""
        return f"its Ray actor on {self.host.address} died" if self._lost else super().exit_reason

    def beat(self) -> Beat:
        """Return its last beat; number 0 before the first."""
        if self._report is None:
            return _NO_BEAT
        beat = self._report.beat
        return beat._replace(failed=self._local(beat.failed))

    def stacks(self) -> bytes:
        """Return the stacks that it has written; empty before."""
        return self._report.stacks if self._report else b""

    def signal(self, number: int) -> None:
        """Forward a signal, if it still runs."""
        if self.code is None:
            self.requests.append(lambda: self.actor.signal.remote(int(number)))

    def request_kill(self) -> None:
        """Ask the actor to kill it."""
        if self.code is None:
            self.requests.append(self.actor.kill.remote)

    def kill(self) -> None:
        """Kill it with all its children; nothing if it has ended."""
        self.request_kill()
        if not self.last.wait(KILLING):
            self.lose()

    def update(self, report: Report, now: float) -> None:
        """Take a report that came now."""
        # The least of all differences: the one with the shortest way.
        self._offset = min(self._offset, now - report.now)
        self._report = report
        for error, line in report.output:
            self.tail.append(line)
            if self.index == 0:
                stream = sys.stderr if error else sys.stdout
                with contextlib.suppress(OSError, ValueError):  # the output is closed
                    stream.write(line)
                    stream.flush()
        if report.code is not None:
            self._end(report.code, self._local(report.ended))

    def lose(self) -> None:
        """Record that the actor died, and its process with it."""
        self._lost = True
        self._end(-signal.SIGKILL, time.monotonic())

    def _end(self, code: int, ended: float) -> None:
        self._code, self.ended = code, ended
        self.last.set()

    def _local(self, seconds: float) -> float:
        """Convert a time of the actor's clock to this machine's; 0 stays 0."""
        return seconds + self._offset if seconds else 0.0


def watch(workers: Sequence[RayWorker], closing: threading.Event) -> None:
    """Take the reports of actors, and make the calls to them, until all have ended."""
    ray = import_ray()
    pending = {worker.actor.report.remote(): worker for worker in workers}
    while pending and not closing.is_set():
        for worker in pending.values():
            while worker.requests:
                worker.requests.popleft()()
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL)
        if ready:
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for ref in ready:
            worker = pending.pop(ref)
            try:
                worker.update(ray.get(ref), time.monotonic())
            except ray.exceptions.RayError:
                worker.lose()
            if worker.code is None:
                pending[worker.actor.report.remote()] = worker


def actor_options(resources: Resources) -> dict[str, Any]:
    """Return the options of an actor of one process."""
    own = dict(resources)
    return {
        "num_cpus": own.pop("CPU", 0),
        "num_gpus": own.pop("GPU", 0),
        **({"memory": own.pop("memory")} if "memory" in own else {}),
        "resources": own,
        "max_restarts": 0,
        "max_concurrency": THREADS,
    }


class Gang:
    """Actors in one placement group, in a `with` block; none is left after the block.

    Args:
        least: the number of processes below which none is started.
        most: the number of processes, if the cluster has room.
        resources: of each process.
        wait: seconds to wait for the room of all.
        stopped: whether a signal came, so that nothing is to be started.
    """

    def __init__(
        self,
        least: int,
        most: int,
        resources: Resources,
        *,
        wait: float,
        stopped: Callable[[], bool],
    ):
        self._least, self._most, self._resources = least, most, resources
        self._wait, self._stopped = wait, stopped
        self._stack = contextlib.ExitStack()
        self._workers: list[RayWorker] = []
        self._actors: list[tuple[Any, Host]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Gang":
        ray = import_ray()
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        with self._stack:
            group, size = self._place()
            actors = []
            self._stack.callback(lambda: [ray.kill(actor) for actor in actors])
            remote = ray.remote(NodeWorker)
            for index in range(size):
                strategy = strategies.PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                )
                options = actor_options(self._resources)
                actors.append(remote.options(**options, scheduling_strategy=strategy).remote())
            hosts = self._ask([actor.host.remote() for actor in actors])
            self._actors = [(actors[index], hosts[index]) for index in order(hosts)]
            self._stack.callback(self._close)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self._actors)

    def coordinator(self, port: int) -> tuple[str, int]:
        """Return the host and the port of process 0: the loopback if all are on one node."""
        actor, host = self._actors[0]
        alone = len({host.node for _, host in self._actors}) == 1
        (number,) = self._ask([actor.claim_port.remote(port)])
        return LOOPBACK if alone else host.address, number

    def starts(
        self, words: Sequence[str], environs: Sequence[Mapping[str, str]]
    ) -> list[Callable[[], RayWorker]]:
        """Return a function for each process that starts it; the last one starts the watch of all.

        The functions raise UserError if a node does not have the current directory.

        Args:
            words: the command after the interpreter.
            environs: variables of each process beside those of its node.
        """
        return [
            functools.partial(self._start, index, words, environ)
            for index, environ in enumerate(environs)
        ]

    def _start(self, index: int, words: Sequence[str], environ: Mapping[str, str]) -> RayWorker:
        actor, host = self._actors[index]
        (error,) = self._ask([actor.start.remote(index, list(words), dict(environ), os.getcwd())])
        if error:
            raise UserError(
                f"jtrain launch: {error}, on the node {host.address} of the Ray cluster. Run in a "
                f"directory that all nodes share: the run is in runs/NAME below it."
            )
        self._workers.append(RayWorker(index, actor, host))
        if len(self._workers) == self.size:
            self._thread.start()
        return self._workers[-1]

    def _ask(self, refs: list[Any]) -> list[Any]:
        """Return the answers of actors that start.

        Raises:
            PeerError: if an actor dies, or does not answer.
        """
        ray = import_ray()
        deadline = time.monotonic() + STARTING
        while len(ray.wait(refs, num_returns=len(refs), timeout=0.1)[0]) < len(refs):
            self._check_signal()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"jtrain launch: the Ray actors did not start within {STARTING:g} s. Read "
                    f"raylet.err in the logs of the nodes: ray logs"
                )
        try:
            return ray.get(refs)
        except ray.exceptions.RayError as error:
            text = str(error)
            if "ModuleNotFoundError" in text or "No module named" in text:
                raise UserError(
                    f"jtrain launch: a node of the Ray cluster cannot import jtrain "
                    f"({_last_line(text)}). Install the same version there: pip install "
                    f"'jtrain[ray]'"
                ) from None
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(
                error.cause, UserError
            ):
                raise error.cause from None
            raise PeerError(
                f"jtrain launch: a Ray actor died while it started: {first_sentence(text)}"
            ) from None

    def _place(self) -> tuple[Any, int]:
        """Return a placement group that the cluster has room for, and its size."""
        ray = import_ray()
        deadline, note = time.monotonic() + self._wait, True
        while True:
            size = min(room(cluster_nodes(available=True), self._resources), self._most)
            late = time.monotonic() >= deadline
            if size == self._most or (late and size >= self._least):
                bundles = [dict(self._resources) for _ in range(size)]
                strategy = "STRICT_SPREAD" if "TPU" in self._resources else "PACK"
                group = ray.util.placement_group(bundles, strategy=strategy)
                self._stack.callback(ray.util.remove_placement_group, group)
                if group.wait(max(deadline - time.monotonic(), 5.0)):
                    return group, size
                late = True  # another program was faster, or a node is gone
            if late:
                raise self._no_room()
            if note and time.monotonic() > deadline - self._wait + 2.0:
                note = False
                sys.stderr.write(
                    f"jtrain launch: the Ray cluster has room for {size} of {self._most} "
                    f"processes now; waiting up to {self._wait:g} s (--wait)\n"
                )
            self._check_signal()
            time.sleep(0.2)

    def _no_room(self) -> UserError | PeerError:
        nodes = cluster_nodes()
        fits = room(nodes, self._resources)
        has = describe_nodes(nodes, self._resources)
        if fits < self._least:
            advice = f"--processes {fits}" if fits else "--resources CPU=1, for example"
            return UserError(no_room(self._least, self._resources, fits, has, advice))
        return PeerError(
            f"jtrain launch: others use the Ray cluster: {self._least} processes did not get "
            f"their resources within {self._wait:g} s, and it has {has} in all. Type the same "
            f"command later, or a larger --wait"
        )

    def _check_signal(self) -> None:
        if self._stopped():
            raise StoppedBeforeStartError

    def _watch(self) -> None:
        watch(self._workers, self._closing)

    def _close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=KILLING)


def no_room(processes: int, needed: Resources, fits: int, has: str, advice: str) -> str:
    """Return the message for more processes than a cluster can hold."""
    return (
        f"jtrain launch: {processes} processes of {format_resources(needed)} each do not fit on "
        f"the Ray cluster, which holds {fits}: {has}. Type {advice}, or add nodes"
    )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip() if text.strip() else "no message"
