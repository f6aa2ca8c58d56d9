"""Engines: they start the processes of a run, and say which have ended."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from jtrain.distributed.launcher.worker import WorkerProcess

Role = Literal["worker", "shard"]


class Process(Protocol):
    """A process that an engine has started."""

    @property
    def end(self) -> str:
        """How it ended, `SIGKILL` or `exit code 70`; empty while it runs."""
        ...

    def output(self) -> str:
        """Return its last output."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


class Engine(Protocol):
    """What starts processes."""

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> Process:
        """Start a process; `environ` says where the others are."""
        ...


class LocalProcess:
    """A process of this machine, which ends with this one."""

    def __init__(self, command: list[str], environ: Mapping[str, str]):
        # From 1 on: the output of process 0 is shown at once.
        self._process = WorkerProcess(1, command, environ)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def end(self) -> str:
        """How it ended; empty while it runs."""
        return "" if self._process.code is None else self._process.exit_reason

    def output(self) -> str:
        """Return its last output."""
        return self._process.hidden_output

    def kill(self) -> None:
        """Kill it with its children."""
        with contextlib.suppress(OSError):
            self._process.__exit__()


class LocalEngine:
    """Processes of this machine.

    Args:
        config: the file with every value of the run.
    """

    def __init__(self, config: Path):
        self._config = config

    def start(self, role: Role, index: int, environ: Mapping[str, str]) -> LocalProcess:
        """Start a process on the CPU, or on the platform that JAX_PLATFORMS names."""
        command = [sys.executable, "-m", "jtrain.server.process", role, f"{index}"]
        command.append(str(self._config))
        return LocalProcess(command, {"JAX_PLATFORMS": "cpu", **os.environ, **environ})
