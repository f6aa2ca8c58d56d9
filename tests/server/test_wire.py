"""Frames, listeners and clients: what arrives is what was sent, and strangers get nothing."""

import json
import socket
import struct
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from comparison import bitwise

from jtrain.errors import ConfigError, PeerError
from jtrain.server import wire
from jtrain.server.client import Client, RefusedError, call_all
from jtrain.server.listener import LOOPBACK, Listener
from jtrain.server.wire import Message, VersionError, WireError, receive, send

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


def client(listener, token="a" * 32, timeout=5.0, **options) -> Client:
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


def test_a_wrong_token_is_refused_with_what_to_type(listener):
    with pytest.raises(ConfigError, match=r"token is not that of this run.*parallel.port=0"):
        client(listener, token="b" * 32).call(Message("hello"))


def test_no_request_is_answered_without_a_token(listener):
    with socket.create_connection((LOOPBACK, listener.port), timeout=5) as stranger:
        send(stranger, Message("pull", {"worker": 0}))
        assert receive(stranger, 0).name == "refused"
        assert stranger.recv(1) == b""


def test_a_peer_of_another_version_is_refused_with_what_to_do(monkeypatch, listener):
    with socket.create_connection((LOOPBACK, listener.port), timeout=5) as stranger:
        stranger.sendall(frame(b'["hello", {}, []]', version=9))
        reply = receive(stranger, 0)
    assert reply.name == "refused"
    assert "Install one version of jtrain" in reply.fields["why"]


def test_a_server_that_does_not_answer_is_given_up(listener):
    stuck = client(listener, timeout=0.2)
    with pytest.raises(PeerError, match=r"the server did not answer within 0.2 s"):
        stuck.call(Message("sleep", {"seconds": 1.0}))
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    gone = Client("server 3", port, token="", most=0, timeout=5, patience=0.2)
    with pytest.raises(PeerError, match=r"server 3 is not there"):
        gone.call(Message("hello"))


def test_several_servers_work_at_the_same_time(listener):
    clients = [client(listener) for _ in range(3)]
    began = time.monotonic()
    call_all(clients, [Message("sleep", {"seconds": 0.3})] * 3)
    assert time.monotonic() - began < 0.8
    for each in clients:
        each.close()


def test_a_port_in_use_is_refused_with_what_to_type(listener):
    with pytest.raises(ConfigError, match=r"parallel.port=\d+ is not available.*parallel.port=0"):
        Listener(echo, token="", most=0, port=listener.port)


def test_a_closed_listener_leaves_no_thread_waiting(listener):
    one = client(listener)
    one.call(Message("hello"))
    listener.close()
    one.close()
    end = time.monotonic() + 5
    while any("_serve" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
