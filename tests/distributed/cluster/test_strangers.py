"""Whoever reaches the port of process 0 neither holds up a start nor ends it."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from test_meet import SAME, ends, member

from jtrain.distributed.cluster import greetings, rendezvous
from jtrain.distributed.cluster.rendezvous import TOKEN, meet
from jtrain.distributed.launcher.port import free_port
from jtrain.errors import ConfigError, PeerError

HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def hello(**change) -> bytes:
    return json.dumps({"index": 1, "processes": 2, "facts": SAME, **change}).encode() + b"\n"


STRANGERS = {
    "silence": b"",
    "a byte": b"{",
    "half a greeting": hello()[:-5],
    "half a greeting, many bytes": b'{"index": "' + b"x" * 100_000,
    "another protocol": HTTP,
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "a line without end": b"x" * (1 << 20),
    "a list": b"[1]\n",
    "null": b"null\n",
    "deep": b"[" * 100_000 + b"\n",
    "no number": hello(index=None),
    "an endless number": b'{"index": Infinity, "processes": 2, "facts": {}}\n',
    "a number of 5,000 digits": b'{"index": ' + b"1" * 5000 + b', "processes": 2}\n',
    "facts of a list": hello(facts=[1]),
    "facts of a number": hello(facts=3),
    "other facts": hello(facts={"config seed": "1"}),
    "facts without end": hello(facts={f"{i}": "x" * 100 for i in range(5_000)}),
    "another number of processes": hello(processes=3),
    "process 0": hello(index=0),
    "a negative process": hello(index=-1),
    "process 2**70": hello(index=2**70),
    "no token": hello(),
    "another token": hello(token="guess"),
    "a token of a list": hello(token=["secret"]),
    "a token of surrogates": hello(token="x").replace(b'"x"', b'"\\ud800"'),
}


@contextlib.contextmanager
def listening_port(patch: pytest.MonkeyPatch) -> Iterator[tuple[int, threading.Event]]:
    """Yield a port, and an event that is set once process 0 listens there."""
    ready, true = threading.Event(), rendezvous._listener

    def listener(cluster):
        found = true(cluster)
        ready.set()
        return found

    patch.setattr(rendezvous, "_listener", listener)
    yield free_port(), ready


def start_with(port: int, ready: threading.Event, before: Callable[[], object], token: str):
    """Return the errors of two processes of a run, whose process 1 comes after `before`."""
    found: list[Exception | None] = [None, None]

    def one(index: int) -> None:
        try:
            if index:
                assert ready.wait(60)
                before()
            meet(member(index, 2, port), SAME, timeout=60.0, token=token)
        except (ConfigError, PeerError) as error:
            found[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_neither_holds_up_a_start_nor_ends_it(kind, monkeypatch):
    monkeypatch.setattr(greetings, "SECONDS", 1e9)  # none is waited for
    with listening_port(monkeypatch) as (port, ready), contextlib.ExitStack() as stack:

        def connect() -> None:
            for _ in range(5):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                with contextlib.suppress(OSError):
                    peer.sendall(STRANGERS[kind])

        assert start_with(port, ready, connect, token="secret") == [None, None]


def test_a_forged_greeting_does_not_take_the_place_of_a_process_without_a_token(monkeypatch):
    with listening_port(monkeypatch) as (port, ready), contextlib.ExitStack() as stack:

        def connect() -> None:
            for change in ({"facts": {"config seed": "\x1b[2J"}}, {"processes": 7}, {"index": 9}):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                peer.sendall(hello(**change))
                assert b"ConfigError" in peer.makefile("rb").readline()

        assert start_with(port, ready, connect, token="") == [None, None]


def test_a_process_with_another_token_is_told_what_to_set():
    port = free_port()
    found: list[Exception] = []

    def one(index: int, token: str) -> None:
        with pytest.raises((ConfigError, PeerError)) as error:
            meet(member(index, 2, port), SAME, timeout=1.0, token=token)
        found.append(error.value)

    threads = [threading.Thread(target=one, args=each) for each in ((0, "a"), (1, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert sorted(type(error).__name__ for error in found) == ["ConfigError", "PeerError"]
    assert all(f"{TOKEN} of a process" in str(error) for error in found)


def test_a_late_greeting_is_given_up(monkeypatch):
    monkeypatch.setattr(greetings, "SECONDS", 0.0)
    with listening_port(monkeypatch) as (port, ready):

        def connect() -> None:
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(b"{")
                with contextlib.suppress(ConnectionResetError):
                    assert peer.recv(1) == b""
            monkeypatch.setattr(greetings, "SECONDS", 60.0)

        assert start_with(port, ready, connect, token="secret") == [None, None]


def test_a_process_that_was_let_go_greets_again(monkeypatch):
    true, lost = rendezvous._send, []

    def send(peer, message):
        if "facts" in message and not lost:
            lost.append(peer)
            peer.shutdown(socket.SHUT_RDWR)
        true(peer, message)

    monkeypatch.setattr(rendezvous, "_send", send)
    port = free_port()
    assert ends([(member(i, 2, port), SAME) for i in range(2)]) == [None, None]
    assert lost


CROWD = """
import resource, socket, sys
port, count, line = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
peers = []
for index in range(1, count + 1):
    peers.append(socket.create_connection(("127.0.0.1", port)))
    if line:
        peers[-1].sendall((line % index).encode() + b"\\n")
print("all", flush=True)
if line:
    lines = [peer.makefile("rb").readline() for peer in peers]
    print(lines.count(b'{"jtrain": "", "error": ""}\\n'))
else:
    sys.stdin.read()
"""


def crowd(port: int, count: int, line: str) -> subprocess.Popen:
    command = [sys.executable, "-c", CROWD, str(port), str(count), line]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the limit of open files; skip where it may not be raised."""
    before, change = resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit
    if 0 <= before[1] < 4096:
        pytest.skip(f"at most {before[1]} open files are allowed here")
    yield lambda soft: change(resource.RLIMIT_NOFILE, (soft, before[1]))
    change(resource.RLIMIT_NOFILE, before)  # a test puts a function in its place


def test_2000_connections_at_256_open_files(monkeypatch, limit):
    limit(256)
    monkeypatch.setattr(resource, "setrlimit", lambda *args: None)  # as where 256 is the most
    with listening_port(monkeypatch) as (port, ready):
        processes = []

        def connect() -> None:
            processes.append(crowd(port, 2000, ""))
            assert processes[0].stdout.readline() == "all\n"

        assert start_with(port, ready, connect, token="secret") == [None, None]
        processes[0].communicate()


def test_1024_processes_meet_at_1024_open_files(monkeypatch, limit):
    limit(1024)
    with listening_port(monkeypatch) as (port, ready):
        line = json.dumps({"index": "%d", "processes": 1024, "facts": SAME})
        others = []
        threading.Thread(
            target=lambda: (ready.wait(60), others.append(crowd(port, 1023, line)))
        ).start()
        meet(member(0, 1024, port), SAME, timeout=100.0)
        assert others[0].communicate()[0].split() == ["all", "1023"]


def test_a_limit_of_open_files_that_is_too_low_is_told_with_a_higher_one(monkeypatch):
    limits = [256, 256]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda *args: None)
    cluster = member(0, 1024, free_port())
    with pytest.raises(ConfigError) as error:
        meet(cluster, SAME, timeout=0.0)
    limits[:] = [int(str(error.value).partition("ulimit -n ")[2].split()[0])] * 2
    with pytest.raises(PeerError, match=r"process 1, 2, 3.*, \.\.\. did not"):
        meet(cluster, SAME, timeout=0.0)
