"""The part of a launch that runs in a Ray actor: one process on the actor's node."""

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jtrain.distributed.heartbeat import Beat
from jtrain.distributed.launcher.port import claimed_port
from jtrain.distributed.launcher.ray.placement import Host
from jtrain.distributed.launcher.worker import WorkerProcess

REPORT = 0.2  # seconds between two reports without news
DRAIN = 1.0  # seconds to read the last output of a process that ended
# Variables that Ray sets for its own workers.
_OF_RAY = ("PYTHONBREAKPOINT", "SPT_NOENV")


class Report(NamedTuple):
    """What the actor knows of its process; times by the monotonic clock of its machine."""

    now: float
    beat: Beat
    code: int | None
    ended: float
    stopped: bool
    stacks: bytes
    output: tuple[tuple[bool, str], ...]
    """New lines of its output; True: from its error stream."""


class NodeWorker:
    """A process on a node of a Ray cluster; an actor of several threads has one.

    The process ends with the actor, however the actor ends.
    """

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._news = threading.Event()
        self._output: list[tuple[bool, str]] = []
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None

    def host(self) -> Host:
        """Return the place of the actor."""
        ray = importlib.import_module("ray")
        return Host(
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            os.environ.get("TPU_NAME", ""),
            int(os.environ.get("TPU_WORKER_ID", "0") or 0),
        )

    def claim_port(self, port: int) -> int:
        """Return a port of this machine, `port` if it is not 0, until the actor ends."""
        return self._stack.enter_context(claimed_port(port))

    def start(
        self,
        index: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        directory: str,
    ) -> str:
        """Start the process; return an error if the node does not have the directory.

        Args:
            words: the words after the interpreter.
            environ: variables beside those of the actor.
            directory: the working directory.
        """
        if not Path(directory).is_dir():
            return f"{directory} does not exist there"
        os.chdir(directory)
        own = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
        reading, writing = os.pipe()
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()
        try:
            self._process = WorkerProcess(
                index,
                [sys.executable, *words],
                {**own, "PYTHONUNBUFFERED": "1", **environ},
                stdout=writing,
                stderr=_Lines(self),
            )
        finally:
            os.close(writing)
        self._stack.enter_context(self._process)
        return ""

    def report(self) -> Report:
        """Return the news of the process, or its last state after a moment without news."""
        process = self._process
        assert process is not None, "the process was started"
        deadline = time.monotonic() + REPORT
        while time.monotonic() < deadline and not self._news.wait(0.02) and process.code is None:
            pass
        code, ended = process.code, process.ended
        if code is not None:
            process.drain(DRAIN)
            self._reader.join(timeout=DRAIN)
        self._news.clear()
        with self._lock:
            output, self._output = tuple(self._output), []
        return Report(
            time.monotonic(),
            process.beat(),
            code,
            ended,
            process.stopped,
            process.stacks(),
            output,
        )

    def signal(self, number: int) -> None:
        """Forward a signal to the process."""
        if self._process is not None:
            self._process.signal(number)

    def kill(self) -> None:
        """Kill the process with all its children."""
        if self._process is not None:
            self._process.kill()

    def add_line(self, error: bool, line: str) -> None:
        """Record a line of the output."""
        with self._lock:
            self._output.append((error, line))
        self._news.set()

    def _read(self, file: int) -> None:
        with open(file, "rb") as pipe:
            for line in pipe:
                self.add_line(False, line.decode(errors="replace"))


class _Lines:
    """A stream that takes the lines of the error stream."""

    def __init__(self, worker: NodeWorker):
        self._worker = worker

    def write(self, text: str, /) -> None:
        self._worker.add_line(True, text)

    def flush(self) -> None:
        """Do nothing: a line is written at once."""
