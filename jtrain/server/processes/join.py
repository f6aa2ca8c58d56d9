"""Workers that join a running run, and tasks of a launcher that are its workers and servers."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from jtrain.config.resolve import resolve
from jtrain.errors import DONE, STOPPED, ConfigError, PeerError
from jtrain.parallel import Server
from jtrain.server.plan.server_plan import Plan, make_plan
from jtrain.server.processes.announcement import FILE, read_announcement
from jtrain.server.processes.process import serve_until_end, work
from jtrain.train.experiment import RunConfig
from jtrain.train.multihost_checks import code_facts

POLL = 0.5  # seconds between two looks for the run
T = TypeVar("T")


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
    run = _Run(directory, wait, log)
    plan: Plan | None = None
    while not leaving.is_set():
        environ = run.find(leaving)
        if environ is None:
            break
        plan = plan or make_plan(read_config(directory))
        log(f"joining {directory} at {environ['JTRAIN_SERVER_ADDRESS']}")
        try:
            facts = code_facts(plan.setup.config)
            ended = work(plan, None, environ, leaving=leaving, facts=facts)
            return DONE if ended else STOPPED
        except (PeerError, ConfigError) as error:
            if isinstance(error, ConfigError) and read_announcement(directory) == environ:
                raise
            if run.has_ended(environ, error):
                return DONE
    return STOPPED


def hold_shard(directory: Path, index: int, *, wait: float, log: Callable[[str], None]) -> int:
    """Hold a shard of a run that a launcher has started beside it; return the exit code.

    Raises:
        PeerError: if the run's own process is not there for `wait` seconds.
    """
    run = _Run(directory, wait, log)
    while True:
        environ = run.find(threading.Event())
        assert environ is not None, "nothing asks a server to leave"
        try:
            return serve_until_end(make_plan(read_config(directory)), index, environ)
        except (PeerError, ConfigError) as error:
            if isinstance(error, ConfigError) and read_announcement(directory) == environ:
                raise
            if run.has_ended(environ, error):
                return DONE


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


class _Run:
    """The announcement of a run, and for how long it was not there."""

    def __init__(self, directory: Path, wait: float, log: Callable[[str], None]):
        self._directory, self._wait, self._log = directory, wait, log
        self._gone: Mapping[str, str] | None = None  # the announcement of a process that is gone
        self._since = time.monotonic()

    def find(self, leaving: threading.Event) -> Mapping[str, str] | None:
        """Return the announcement of the run once it is there; None if `leaving` was set.

        Raises:
            PeerError: after `wait` seconds.
        """
        self._since, said = time.monotonic(), False
        while not leaving.is_set():
            environ = read_announcement(self._directory)
            if environ is not None and environ != self._gone:
                return environ
            if time.monotonic() > self._since + self._wait:
                raise PeerError(
                    f"{self._directory / FILE} has named no running run for {self._wait:g} s. "
                    f"Start it: jtrain run {self._directory}/config.yaml; or wait longer for it by "
                    f"--wait"
                )
            if not said:
                self._log(f"waiting for the run in {self._directory}")
                said = True
            leaving.wait(POLL)
        return None

    def has_ended(self, environ: Mapping[str, str], error: Exception) -> bool:
        """Return whether the run whose process is gone has ended, and not failed."""
        if read_announcement(self._directory) is None:
            return True
        self._gone = environ
        self._log(f"{error}; waiting for the run to be started again")
        return False
