"""Frames, listeners and clients: what arrives is what was sent, and strangers get nothing."""

import contextlib
import json
import socket
import ssl
import struct
import threading
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import bitwise

from jtrain.distributed.cluster import tls
from jtrain.errors import ConfigError, PeerError
from jtrain.server import listener as listener_module
from jtrain.server import wire
from jtrain.server.client import Client, RefusedError, call_all
from jtrain.server.listener import LOOPBACK, Listener
from jtrain.server.wire import ALIGNMENT, SMALL, BufferPool, Message, WireError, receive, send


@pytest.fixture(scope="module")
def certificates():
    """Those of two launches."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(tls, "takes_certificates", lambda version: True)
        found = [stack.enter_context(tls.throwaway_certificate({})) for _ in range(2)]
        yield [tls.PeerTls.read(variables, supported=True) for variables in found]


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


def frame(text: bytes, size: int = 0, magic: bytes = wire.MAGIC) -> bytes:
    return struct.pack("<4sIQ", magic, len(text), size) + text


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
        (frame(b"[]", magic=b"HTTP"), "not a parameter server"),
        (frame(b"[]", size=2000), "over the limit"),
        (frame(b"{"), "malformed"),
        (frame(json.dumps(["a", {}, [["object", [1]]]]).encode(), 8), "malformed.*object"),
        (frame(json.dumps(["a", {}, [["float32", [1]]]]).encode(), 4), "cut off"),
    ],
)
def test_a_malformed_frame_is_an_error(sent, words):
    with pytest.raises(WireError, match=words):
        through(sent)


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


def test_a_wrong_token_is_refused_with_what_to_type(listener):
    with pytest.raises(ConfigError, match=r"token is not that of this run.*parallel.port=0"):
        client(listener, token="b" * 32).call(Message("hello"))


def test_with_certificates_all_is_encrypted_and_others_are_refused(certificates):
    own, other = certificates
    with Listener(echo, token="a" * 32, most=1000, tls=own) as listener:
        one = client(listener, tls=own)
        for number in range(2):
            assert bitwise(one.call(Message("again", {}, ARRAYS[:1])).arrays[0], ARRAYS[0]), number
        assert isinstance(one._connection, ssl.SSLSocket)
        with pytest.raises(ConfigError, match="do not take each other's certificates"):
            client(listener, tls=other).call(Message("again"))
        with pytest.raises(PeerError, match="is not there"):
            client(listener, patience=0.2).call(Message("again"))
        assert one.call(Message("third")).name == "echo"
        one.close()


def test_a_server_that_does_not_answer_is_given_up(listener):
    stuck = client(listener, timeout=0.2)
    with pytest.raises(PeerError, match=r"the server did not answer within 0.2 s"):
        stuck.call(Message("sleep", {"seconds": 1.0}))
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        gone = Client("server 3", free.getsockname()[1], token="", most=0, timeout=5, patience=0.2)
        with pytest.raises(PeerError, match=r"server 3 is not there"):
            gone.call(Message("hello"))


def test_a_reply_is_that_of_its_own_request_after_an_error_elsewhere(listener):
    """The reply to the first request of the pair was due when the other failed."""
    one, stranger = client(listener), client(listener, token="b" * 32)
    with pytest.raises(ConfigError):
        call_all([one, stranger], [Message("a", {"x": 1}), Message("b")])
    assert one.call(Message("a", {"x": 2})).fields == {"x": 2}
    one._send(Message("a", {"x": 3}))  # a call that a signal interrupts before it reads
    assert one.call(Message("a", {"x": 4})).fields == {"x": 4}
    one.close()


STRANGERS = {
    "half a header": frame(b"")[:9], "half of its JSON": frame(b"[" * 100)[:-50],
    "more JSON than is allowed": frame(b"[" * (wire.MOST_JSON + 1)),
    "arrays": frame(b'["hello", {}, [["int8", [8]]]]', size=8) + bytes(8),
    "a dim of 2**63 - 1": frame(b'["hello", {}, [["int8", [0, 9223372036854775807]]]]'),
    "a negative dim": frame(b'["hello", {}, [["int8", [-1, 0]]]]'),
    "a deep frame": frame(b"[" * 100_000), "no UTF-8": frame(b'["\xff", {}, []]'),
    "a token of null": frame(b'["hello", {"token": null}, []]'),
    "a token that is not text": frame(b'["hello", {"token": "\\ud800"}, []]'),
    "a request": frame(b'["pull", {"worker": 0}, []]'),
}  # fmt: skip


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


def test_a_frame_without_a_token_ends_its_connection_and_nothing_else(monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with Listener(echo, token="ours", most=1000) as found, contextlib.ExitStack() as stack:
        for kind, sent in STRANGERS.items():
            peer = stack.enter_context(socket.create_connection((LOOPBACK, found.port), 60))
            with contextlib.suppress(OSError):
                peer.sendall(sent)
                if "half" not in kind:
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):
                        pass
            one = client(found, token="ours")
            assert one.call(Message("ask", {"x": 1})).fields == {"x": 1}, kind
            one.close()
    assert raised == []


def place(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("size", [10, SMALL + 5])
def test_buffers_have_their_size_and_jax_takes_them_without_a_copy(size):
    buffer = BufferPool().take(size)
    assert (buffer.size, place(buffer) % ALIGNMENT) == (size, 0)
    assert jnp.from_dlpack(buffer).unsafe_buffer_pointer() == place(buffer)


def test_a_buffer_is_used_again_when_no_array_lies_in_it():
    pool = BufferPool()
    first = place(pool.take(2 * SMALL))
    assert place(pool.take(2 * SMALL)) == first
    assert place(pool.take(SMALL)) == first


@pytest.mark.parametrize(
    "hold", [lambda buffer: buffer.view(np.float32).reshape(-1, 64)[3:4], jnp.from_dlpack]
)
def test_a_buffer_that_anything_lies_in_is_left_alone(hold):
    pool = BufferPool()
    buffer = pool.take(SMALL)
    first, held = place(buffer), hold(buffer)
    del buffer
    other = pool.take(SMALL)
    assert place(other) != first
    del held
    assert place(pool.take(SMALL)) == first
