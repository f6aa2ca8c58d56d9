"""Frames, listeners and clients: what arrives is what was sent, and strangers get nothing."""

import contextlib
import errno
import itertools
import json
import socket
import struct
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from comparison import bitwise

from jtrain.distributed.cluster import Cluster, rendezvous
from jtrain.distributed.cluster.cluster import CoordinatorAddress
from jtrain.errors import ConfigError, PeerError
from jtrain.server.transport import listener as listener_module
from jtrain.server.transport import wire
from jtrain.server.transport.client import Client, RefusedError, call_all
from jtrain.server.transport.listener import LOOPBACK, Listener
from jtrain.server.transport.wire import Message, VersionError, WireError, receive, send

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.float32(3),
    np.zeros((0, 4), np.int32),
    np.array([True, False]),
    np.ones((2, 2), ml_dtypes.bfloat16),
]


def through(frame: bytes, most: int = 1000) -> Message:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(frame)
        here.shutdown(socket.SHUT_WR)
        return receive(there, most)


def frame(text: bytes, size: int = 0, magic: bytes = b"JTPS", version: int = wire.VERSION) -> bytes:
    return struct.pack("<4sHIQ", magic, version, len(text), size) + text


def test_a_message_arrives_as_it_was_sent():
    here, there = socket.socketpair()
    with here, there:
        send(here, Message("push", {"number": 3, "of": [1, 2]}, ARRAYS))
        got = receive(there, 1000)
    assert (got.name, got.fields) == ("push", {"number": 3, "of": [1, 2]})
    assert bitwise(list(got.arrays), [np.ascontiguousarray(x).reshape(x.shape) for x in ARRAYS])
    assert [x.dtype for x in got.arrays] == [x.dtype for x in ARRAYS]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (frame(b"[]", magic=b"HTTP"), "no parameter server"),
        (frame(b"[]", size=2000), "over the limit"),
        (frame(b"{"), "malformed"),
        (frame(b'["a", {}]'), "malformed"),
        (frame(b"[1, {}, []]"), "no request"),
        (frame(json.dumps(["a", {}, [["object", [1]]]]).encode(), 8), "an array 'object'"),
        (frame(json.dumps(["a", {}, [["float32", [-1]]]]).encode(), 4), "an array 'float32'"),
        (frame(json.dumps(["a", {}, [["float32", [1 << 39, 9]]]]).encode(), 4), "of shape"),
        (frame(json.dumps(["a", {}, [["float32", [2]]]]).encode(), 4), "another size"),
        (frame(json.dumps(["a", {}, [["float32", [1]]]]).encode(), 4), "cut off"),
    ],
)
def test_a_malformed_frame_is_an_error(sent, words):
    with pytest.raises(WireError, match=words):
        through(sent)


def test_a_frame_of_another_version_names_both():
    with pytest.raises(VersionError, match=f"version 9 .* version {wire.VERSION}"):
        through(frame(b"[]", version=9))


def echo(request: Message) -> Message:
    if request.name == "fail":
        raise ValueError("not this")
    if request.name == "sleep":
        time.sleep(request.fields["seconds"])
    return Message("echo", request.fields, request.arrays)


@pytest.fixture
def listener():
    with Listener(echo, token="a" * 32, most=1000) as found:
        yield found


def client(listener, token="a" * 32, timeout=60.0, **options) -> Client:
    return Client("the server", listener.port, token=token, most=1000, timeout=timeout, **options)


def test_a_client_gets_replies_and_refusals(listener):
    one = client(listener)
    assert one.call(Message("hello", {"x": 1})).fields == {"x": 1}
    with pytest.raises(RefusedError, match="not this"):
        one.call(Message("fail"))
    assert one.call(Message("again")).name == "echo", "the connection goes on"
    one.close()


def test_a_request_is_sent_again_over_a_new_connection(listener):
    one = client(listener)
    one.call(Message("first"))
    assert one._connection is not None
    one._connection.shutdown(socket.SHUT_RDWR)
    assert one.call(Message("second", {"y": 2})).fields == {"y": 2}
    one.close()


def test_traffic_is_the_bytes_of_the_frames(listener):
    one = client(listener)
    one.call(Message("first"))
    one.call(Message("push", {"number": 3}, ARRAYS))
    here, there = socket.socketpair()
    with here, there:
        asked = send(here, Message("push", {"number": 3}, ARRAYS))
        here.shutdown(socket.SHUT_WR)
        arrived = b"".join(iter(lambda: there.recv(1 << 16), b""))
    assert asked == len(arrived)
    assert through(arrived).frame_bytes == asked
    echoed = asked  # of the same length: push and echo have four letters
    assert listener.traffic("push").named == asked + echoed
    assert listener.traffic().received > asked
    one.close()


def test_a_wrong_token_is_refused_with_what_to_type(listener):
    with pytest.raises(ConfigError, match=r"token is not that of this run.*parallel.port=0"):
        client(listener, token="b" * 32).call(Message("hello"))


def test_no_request_is_answered_without_a_token(listener):
    with socket.create_connection((LOOPBACK, listener.port), timeout=60) as stranger:
        send(stranger, Message("pull", {"worker": 0}))
        assert receive(stranger, 0).name == "refused"
        assert stranger.recv(1) == b""


def test_a_peer_of_another_version_is_refused_with_what_to_do(monkeypatch, listener):
    with socket.create_connection((LOOPBACK, listener.port), timeout=60) as stranger:
        stranger.sendall(frame(b'["hello", {}, []]', version=9))
        reply = receive(stranger, 0)
    assert reply.name == "refused"
    assert "Install one version of jtrain" in reply.fields["why"]


@pytest.fixture
def closing_port():
    """Port whose listener reads a greeting and closes the connection, as one that ends may."""
    with socket.create_server((LOOPBACK, 0)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as peer:
                        receive(peer, 0)

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_peer_that_closes_a_connection_before_its_greeting_is_not_there(closing_port):
    one = Client("the run", closing_port, token="", most=0, timeout=5, patience=0.2)
    with pytest.raises(PeerError, match=r"the run is not there"):
        one.call(Message("join"))
    with pytest.raises(PeerError, match=r"the run is not there: "):
        one.local_host()


def test_a_socket_that_the_kernel_connects_to_itself_reaches_nobody(monkeypatch):
    def connect(address, timeout):
        del address
        found = socket.socket()
        found.settimeout(timeout)
        found.bind((LOOPBACK, 0))
        found.connect(found.getsockname())
        return found

    monkeypatch.setattr(socket, "create_connection", connect)
    one = Client("the run", 1, token="", most=0, timeout=5, patience=0.2)
    with pytest.raises(PeerError, match=r"the run is not there"):
        one.call(Message("join"))
    where = CoordinatorAddress(LOOPBACK, 1)
    with pytest.raises(PeerError, match=r"tried 0.2 s .* \(Connection refused\)"):
        rendezvous.connect(Cluster(processes=2, index=1, coordinator=where), 0.2)


def test_a_server_that_does_not_answer_is_given_up(listener):
    stuck = client(listener, timeout=0.2)
    with pytest.raises(PeerError, match=r"the server did not answer within 0.2 s"):
        stuck.call(Message("sleep", {"seconds": 1.0}))
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        gone = Client("server 3", free.getsockname()[1], token="", most=0, timeout=5, patience=0.2)
        with pytest.raises(PeerError, match=r"server 3 is not there"):
            gone.call(Message("hello"))


def test_a_late_answer_is_asked_for_again_while_there_is_patience():
    late = [1.0]
    with Listener(
        lambda request: echo(Message("sleep", {"seconds": late.pop() if late else 0.0})),
        token="",
        most=0,
    ) as slow:
        one = client(slow, token="", timeout=0.3, patience=60.0)
        assert one.call(Message("ask")).fields == {"seconds": 0.0}
        one.close()


def test_a_reply_is_that_of_its_own_request_after_an_error_elsewhere(listener):
    """The reply to the first request of the pair was due when the other failed."""
    one, stranger = client(listener), client(listener, token="b" * 32)
    with pytest.raises(ConfigError):
        call_all([one, stranger], [Message("a", {"x": 1}), Message("b")])
    assert one.call(Message("a", {"x": 2})).fields == {"x": 2}
    one._send(Message("a", {"x": 3}))  # a call that a signal interrupts before it reads
    assert one.call(Message("a", {"x": 4})).fields == {"x": 4}
    one.close()


class StallingProxy:
    """A network between a client and a listener, in a `with` block: it stops after some bytes.

    Args:
        forth, back: bytes that it lets through in each direction, by connection; then all.
    """

    def __init__(self, port, forth=(), back=()):
        self._port, self._limits = port, (list(forth), list(back))
        self._open = [socket.create_server((LOOPBACK, 0))]
        self._threads = [threading.Thread(target=self._accept)]
        self.port = self._open[0].getsockname()[1]

    def __enter__(self):
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for each in self._open:
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # shut down
            while True:
                near, _ = self._open[0].accept()
                self._open.append(near)
                far = socket.create_connection((LOOPBACK, self._port))
                self._open.append(far)
                for pair, limits in zip(((near, far), (far, near)), self._limits, strict=True):
                    limit = limits.pop(0) if limits else 1 << 60
                    self._threads.append(threading.Thread(target=self._carry, args=(*pair, limit)))
                    self._threads[-1].start()

    def _carry(self, source, to, limit):
        with contextlib.suppress(OSError):
            while limit and (data := source.recv(min(limit, 4096))):
                to.sendall(data)
                limit -= len(data)
            if limit:
                to.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("stalls", [{"forth": [300]}, {"back": [60]}, {"forth": [5]}])
def test_a_network_that_stalls_delays_a_push_and_does_not_double_it(stalls):
    taken, pushes = [], []

    def handle(request: Message) -> Message:
        pushes.append(request.fields["number"])
        if request.fields["number"] not in taken:
            taken.append(request.fields["number"])
        return Message("applied", {"sum": float(request.arrays[0].sum())})

    array = np.ones(200, np.float32)
    with (
        Listener(handle, token="t", most=1000, timeout=1.0) as listener,
        StallingProxy(listener.port, **stalls) as proxy,
    ):
        timeouts = itertools.chain([1.0], itertools.repeat(60.0))  # of the connections

        def locate():
            one._timeout = next(timeouts)
            return LOOPBACK, proxy.port

        one = Client("server", locate, token="t", most=1000, timeout=1.0, patience=60.0)
        for number in (1, 2):
            assert one.call(Message("push", {"number": number}, [array])).fields == {"sum": 200.0}
        one.close()
    assert taken == [1, 2]
    assert pushes == ([1, 1, 2] if "back" in stalls else [1, 2]), "sent again where no answer came"


def test_a_peer_that_stalls_in_the_middle_of_a_frame_is_let_go():
    with (
        Listener(echo, token="t", most=1000, timeout=0.3) as listener,
        socket.create_connection((LOOPBACK, listener.port), timeout=60) as peer,
    ):
        send(peer, Message("hello", {"token": "t"}))
        assert receive(peer, 0).name == "welcome"
        time.sleep(0.5)  # between two frames it may compute for as long as it likes
        send(peer, Message("echo"))
        assert receive(peer, 0).name == "echo"
        peer.sendall(b"JTPS")
        assert peer.recv(1) == b""


def test_several_servers_work_at_the_same_time():
    all_are_here = threading.Barrier(3, timeout=60)

    def work(request: Message) -> Message:
        all_are_here.wait()
        return request

    with Listener(work, token="a" * 32, most=1000) as listener:
        clients = [client(listener, timeout=60.0) for _ in range(3)]
        call_all(clients, [Message("work")] * 3)
        for each in clients:
            each.close()


def test_a_port_in_use_is_refused_with_what_to_type(listener):
    with pytest.raises(ConfigError, match=r"parallel.port=\d+ is not available.*parallel.port=0"):
        Listener(echo, token="", most=0, port=listener.port)


def test_a_port_at_which_another_begins_to_listen_at_the_same_moment_is_refused(monkeypatch):
    """Both have bound it, and the kernel refuses the second that listens."""

    def refuse(*_):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "listen", refuse)
    with pytest.raises(ConfigError, match=r"parallel.port=0 is not available"):
        Listener(echo, token="", most=0)


def test_a_connection_that_cannot_be_accepted_is_not_the_last(monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files")])

    def fails_once(self):
        for error in failures:
            raise error
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    with (
        Listener(lambda request: Message("done"), token="ours", most=0) as found,
        contextlib.closing(
            Client("server", found.port, token="ours", most=0, timeout=60)
        ) as client,
    ):
        assert client.call(Message("ask")).name == "done"


def test_a_stranger_whose_token_is_no_text_is_refused_and_let_go(listener):
    with socket.create_connection((LOOPBACK, listener.port), timeout=60) as stranger:
        send(stranger, Message("hello", {"token": "\ud800"}))
        assert receive(stranger, 0).name == "refused"
        assert not stranger.recv(1)


STRANGERS = {
    "silence": b"",
    "a byte": b"J",
    "garbage": b"\xff" * 100,
    "half a header": frame(b"")[:9],
    "half of its JSON": frame(b"[" * 100)[:-50],
    "more JSON than is allowed": frame(b"[" * (wire.MOST_JSON + 1)),
    "arrays": frame(b'["hello", {}, [["int8", [8]]]]', size=8) + bytes(8),
    "no item of a long array": frame(
        b'["hello", {}, [["int8", [0, 1099511627775, 1099511627775]]]]'
    ),
    "a dim of 2**63 - 1": frame(b'["hello", {}, [["int8", [0, 9223372036854775807]]]]'),
    "a negative dim": frame(b'["hello", {}, [["int8", [-1, 0]]]]'),
    "a dim of true": frame(b'["hello", {}, [["int8", [true, 0]]]]'),
    "many arrays": frame(b'["hello", {}, [' + b'["int8", [0]], ' * 9999 + b'["int8", [0]]]]'),
    "33 dims": frame(json.dumps(["hello", {}, [["int8", [0] * 33]]]).encode()),
    "a dtype of a list": frame(b'["hello", {}, [[["int8"], [0]]]]'),
    "a deep frame": frame(b"[" * 100_000),
    "no UTF-8": frame(b'["\xff", {}, []]'),
    "5,000 digits": frame(b'["hello", {"token": ' + b"1" * 5000 + b"}, []]"),
    "a name of a number": frame(b"[3, {}, []]"),
    "fields of a list": frame(b'["hello", [], []]'),
    "a token of null": frame(b'["hello", {"token": null}, []]'),
    "another version": frame(b"", version=9),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_frame_without_a_token_ends_its_connection_and_nothing_else(kind, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with Listener(echo, token="ours", most=1000) as found, contextlib.ExitStack() as stack:
        for _ in range(3):
            peer = stack.enter_context(socket.create_connection((LOOPBACK, found.port), 60))
            with contextlib.suppress(OSError):
                peer.sendall(STRANGERS[kind])
                if kind not in {"silence", "a byte", "half a header", "half of its JSON"}:
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):
                        pass
        one = client(found, token="ours")
        assert one.call(Message("ask", {"x": 1})).fields == {"x": 1}
        one.close()
    assert raised == []


def test_a_crowd_that_says_nothing_does_not_hold_up_a_server(monkeypatch):
    monkeypatch.setattr(listener_module, "STRANGERS", 8)
    with Listener(echo, token="ours", most=1000) as found, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((LOOPBACK, found.port), 60))
            for _ in range(100)
        ]
        one = client(found, token="ours")
        assert one.call(Message("ask", {"x": 1})).fields == {"x": 1}
        assert silent[0].recv(1) == b"", "the oldest gave way"
        one.close()


def test_a_closed_listener_leaves_no_thread_waiting(listener):
    before = set(threading.enumerate())  # of other tests, too
    one = client(listener)
    one.call(Message("hello"))
    serving = [t for t in threading.enumerate() if "_serve" in t.name and t not in before]
    assert serving
    listener.close()
    one.close()
    for thread in serving:
        thread.join(60)
        assert not thread.is_alive()
