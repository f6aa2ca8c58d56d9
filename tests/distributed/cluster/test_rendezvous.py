"""Processes meet before JAX starts, and agree; nobody else holds a start up or ends it."""

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from jtrain.distributed.cluster import rendezvous
from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.rendezvous import HELLO, TOKEN, bind_host, meet
from jtrain.distributed.port import free_port
from jtrain.errors import ConfigError, PeerError

SAME = {"config seed": "0", "package jax": "0.10.2"}


def member(index: int, processes: int, port: int) -> Cluster:
    where = CoordinatorAddress("127.0.0.1", port)
    by = {"JTRAIN_COORDINATOR": str(where)}
    return Cluster(kind="x", processes=processes, index=index, coordinator=where, by=by)


def ends(
    members: list[tuple[Cluster, dict]],
    timeout: float = 5.0,
    options: Sequence[dict] = ({},) * 5,
    before: Callable[[int], object] = lambda index: None,
) -> list[Exception | None]:
    """Return the error of each process, None without one; each does something before it meets."""
    found: list[Exception | None] = [None] * len(members)

    def one(place: int, cluster: Cluster, facts: dict) -> None:
        try:
            before(place)
            meet(cluster, facts, timeout=timeout, **options[place])
        except (ConfigError, PeerError) as error:
            found[place] = error

    threads = [
        threading.Thread(target=one, args=(place, *each)) for place, each in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive()
    return found


def test_processes_with_equal_facts_meet():
    port = free_port()
    assert ends([(member(i, 5, port), SAME) for i in (3, 1, 0, 4, 2)]) == [None] * 5
    socket.create_server(("127.0.0.1", port)).close()  # and the port is free again


def test_a_difference_is_named_in_all_processes():
    port = free_port()
    other = {"config seed": "1", "package jax": "0.10.2", "code jtrain/core/step.py": "ab12"}
    found = ends(
        [(member(0, 3, port), SAME), (member(1, 3, port), SAME), (member(2, 3, port), other)],
        timeout=1.0,
    )
    assert list(map(type, found)) == [PeerError, PeerError, ConfigError]
    assert "process 2 did not" in str(found[0])
    for said in map(str, found):
        assert "process 2 (from 127.0.0.1) differs from process 0" in said
        assert "config seed: 0 in process 0, 1 in process 2" in said
        assert "code jtrain/core/step.py: none in process 0, ab12 in process 2" in said
        assert "package jax" not in said
        assert "Start all of them by the same command" in said


def test_a_missing_process_is_named_in_time():
    port = free_port()
    began = time.monotonic()
    found = ends([(member(i, 4, port), SAME) for i in (0, 2)], timeout=1.5)
    assert time.monotonic() - began < 1.5 + HELLO, "no greeting is waited for"
    for error in found:
        assert isinstance(error, PeerError)
        assert "2 of 4 processes reached 127.0.0.1" in str(error)
        assert "process 1, 3 did not. Start them with the same JTRAIN_COORDINATOR" in str(error)
        assert "parallel.start_timeout=3" in str(error)


def test_two_processes_with_one_number_are_refused():
    port = free_port()
    found = ends([(member(i, 3, port), SAME) for i in (0, 1, 1)], timeout=1.0)
    assert all("two processes are both process 1 of 3" in str(e) for e in found)


def test_a_port_in_use_is_refused_with_its_holder_and_another_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port} ") as error:
            meet(member(0, 2, port), SAME, timeout=1.0)
        said = str(error.value)
        assert f"(process {os.getpid()} (" in said
        assert f"listens at port {port}). Set JTRAIN_COORDINATOR=127.0.0.1:" in said
        assert said.endswith(f"for all processes, or stop it: kill {os.getpid()}")
        told = re.search(r"JTRAIN_COORDINATOR=127.0.0.1:(\d+) for all", said)
        assert told is not None
        assert ends([(member(i, 2, int(told[1])), SAME) for i in range(2)]) == [None, None]


def test_another_program_at_the_port_is_not_taken_for_process_0():
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def answer() -> None:
            peer, _ = taken.accept()
            peer.recv(10)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

        threading.Thread(target=answer).start()
        with pytest.raises(PeerError, match="another program has that port"):
            meet(member(1, 2, taken.getsockname()[1]), SAME, timeout=2.0)


def test_listens_on_the_loopback_where_the_coordinator_is():
    assert (
        bind_host(CoordinatorAddress("127.0.0.1", 1))
        == bind_host(CoordinatorAddress("localhost", 1))
        == "127.0.0.1"
    )
    assert bind_host(CoordinatorAddress("::1", 1)) == "::1"
    assert bind_host(CoordinatorAddress("198.51.100.7", 1)) == "198.51.100.7"
    assert bind_host(CoordinatorAddress("no-such-host.invalid", 1)) == ""


def test_an_address_of_the_internet_gives_a_warning():
    def describe(host: str) -> list[str]:
        at = CoordinatorAddress(host, 8476)
        return Cluster(kind="x", processes=2, index=0, coordinator=at, by={"HOST": host}).describe()

    for host in ("8.8.8.8", "2606:4700::1111"):
        _, warning = describe(host)
        assert f"{host} can be reached from the internet" in warning
        assert "keep its port behind a firewall, or name an address" in warning
        assert "by HOST" in warning
    for host in ("127.0.0.1", "10.1.2.3", "192.168.0.9", "fd00::1", "::1", "host-0", "localhost"):
        assert len(describe(host)) == 1


def hello(**change) -> bytes:
    return json.dumps({"index": 1, "processes": 2, "facts": SAME, **change}).encode() + b"\n"


STRANGERS = {
    "silence": b"",
    "half a greeting": hello()[:-5],
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a line without end": b"x" * (1 << 20),
    "deep": b"[" * 100_000 + b"\n",
    "a number of 5,000 digits": b'{"index": ' + b"1" * 5000 + b', "processes": 2}\n',
    "facts of a list": hello(facts=[1]),
    "another number of processes": hello(processes=3),
    "process 0": hello(index=0),
    "another token": hello(token="guess"),
    "a token of surrogates": hello(token="x").replace(b'"x"', b'"\\ud800"'),
}


@contextlib.contextmanager
def listening_port(patch: pytest.MonkeyPatch) -> Iterator[tuple[int, threading.Event]]:
    """Yield a port, and an event that is set once process 0 listens there."""
    ready, true = threading.Event(), rendezvous._listen

    def listener(cluster):
        found = true(cluster)
        ready.set()
        return found

    patch.setattr(rendezvous, "_listen", listener)
    yield free_port(), ready


def start_with(port: int, ready: threading.Event, before: Callable[[], object], token: str):
    """Return the errors of two processes of a run, whose process 1 comes after `before`."""
    late = lambda index: index and (ready.wait(60), before())
    both = [(member(index, 2, port), SAME) for index in range(2)]
    return ends(both, 60.0, ({"token": token},) * 2, late)


def test_a_stranger_neither_holds_up_a_start_nor_ends_it(monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO", 100.0)  # none is waited for
    with listening_port(monkeypatch) as (port, ready), contextlib.ExitStack() as stack:

        def connect() -> None:
            for said in STRANGERS.values():
                for _ in range(5):
                    peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    with contextlib.suppress(OSError):
                        peer.sendall(said)

        assert start_with(port, ready, connect, token="secret") == [None, None]


def test_a_process_with_another_token_is_told_what_to_set():
    port = free_port()
    both = [(member(index, 2, port), SAME) for index in range(2)]
    found = ends(both, 1.0, ({"token": "a"}, {"token": "b"}))
    assert sorted(type(error).__name__ for error in found) == ["ConfigError", "PeerError"]
    assert all(f"{TOKEN} of a process" in str(error) for error in found)


CROWD = """
import resource, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
peers = []
for _ in range(count):
    peers.append(socket.create_connection(("127.0.0.1", port)))
print("all", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """Allow 256 open files besides those of earlier tests."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= before[1] < 4096:
        pytest.skip(f"a crowd may have at most {before[1]} open files here")
    already = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (already + 256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_2000_connections_at_256_open_files(few_open_files, monkeypatch):
    monkeypatch.setattr(rendezvous, "_allow_open_files", lambda: 256)  # as where that is the most
    monkeypatch.setattr(rendezvous, "HELLO", 0.3)
    with listening_port(monkeypatch) as (port, ready):
        processes, pipe = [], subprocess.PIPE

        def connect() -> None:
            command = [sys.executable, "-c", CROWD, f"{port}", "2000"]
            processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            assert processes[0].stdout.readline() == "all\n"

        assert start_with(port, ready, connect, token="secret") == [None, None]
        processes[0].communicate()
