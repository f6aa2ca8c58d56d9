"""Listener: answers the requests of peers that know the token."""

import collections
import contextlib
import errno
import hmac
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.errors import ConfigError
from jtrain.server.wire import BufferPool, Message, VersionError, WireError, frame_of, receive, send

RETRY = 0.05  # seconds after a connection that could not be accepted
GREETING = 10.0  # seconds within which a peer says who it is
STRANGERS = 64  # peers at a time that have not said so; the oldest gives way
Handler = Callable[[Message], Message]


class Traffic(NamedTuple):
    """Bytes of frames: headers, JSON and arrays."""

    received: int
    sent: int
    named: int
    """Bytes of some requests and their replies, of those above."""


def keep_alive(connection: socket.socket) -> None:
    """Send at once, and notice within half a minute that the machine of the peer is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Server of requests, in a `with` block; each peer has a thread.

    Args:
        handle: returns the reply to a request; an exception is sent to the peer in words.
        token: that a peer must know; compared in constant time.
        most: bytes of the arrays of a request.
        port: to listen at; 0: a free one.
        host: address of this machine to listen at; empty: all.
        lost: takes the last request of a peer whose connection has ended.
        timeout: seconds that a peer may stall in the middle of a frame.

    Raises:
        ConfigError: if the port is in use, or the host is no address of this machine.
    """

    def __init__(
        self,
        handle: Handler,
        *,
        token: str,
        most: int,
        port: int = 0,
        host: str = LOOPBACK,
        lost: Callable[[Message], None] = lambda request: None,
        timeout: float = 60.0,
    ):
        self._handle, self._token, self._most, self._lost = handle, token, most, lost
        self._timeout = timeout
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen()  # another one may have begun to since
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE and host not in {"", LOOPBACK}:
                raise ConfigError(
                    f"parallel.host={host} is no address of this machine ({error.strerror}). Set "
                    f"parallel.host to one that the other machines reach, such as one that ip addr "
                    f"prints, or to {LOOPBACK}."
                ) from None
            raise ConfigError(
                f"parallel.port={port} is not available ({error.strerror}). Set parallel.port=0 to "
                f"use a free one."
            ) from None
        self._peers: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._pool = BufferPool()
        self._lock, self._closed = threading.Lock(), False
        self._received = self._sent = 0
        self._by_name: collections.Counter[str] = collections.Counter()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Port that it listens at."""
        return self._socket.getsockname()[1]

    def traffic(self, *names: str) -> Traffic:
        """Return the bytes so far, and those of requests of some names."""
        with self._lock:
            named = sum(self._by_name[name] for name in names)
            return Traffic(self._received, self._sent, named)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            for each in [self._socket, *self._peers]:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                self._let_go(0)  # the peer is gone already, or this process has no file left
                time.sleep(RETRY)
                continue
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                self._peers.add(peer)
                self._strangers[peer] = None
            self._let_go(STRANGERS)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        last: Message | None = None
        try:
            keep_alive(peer)
            is_known = self._greet(peer)
            with self._lock:
                self._strangers.pop(peer, None)
            if is_known:
                while True:
                    peer.settimeout(None)  # it may compute for long between two requests
                    peer.recv(1, socket.MSG_PEEK)
                    peer.settimeout(self._timeout)
                    request = receive(peer, self._most, self._pool)
                    last = Message(request.name, request.fields)  # without its arrays
                    self._answer(peer, request)
                    del request  # so that its buffer is free for the next
        except OSError:
            pass  # the peer is gone
        finally:
            with self._lock:
                self._peers.discard(peer)
                self._strangers.pop(peer, None)
            peer.close()
            if last is not None and not self._closed:
                self._lost(last)

    def _let_go(self, most: int) -> None:
        """End the oldest greeting if there are more than `most`."""
        with self._lock:
            if len(self._strangers) > most:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _greet(self, peer: socket.socket) -> bool:
        """Return whether the peer has the version and the token; it is told what it lacks."""
        peer.settimeout(GREETING)
        try:
            hello = receive(peer, 0)
        except VersionError as error:
            send(peer, _refusal(error))
            return False
        token = hello.fields.get("token")
        token = token if hello.name == "hello" and isinstance(token, str) else ""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            send(peer, _refusal(PermissionError("the token is not that of this run")))
            return False
        send(peer, Message("welcome"))
        return True

    def _answer(self, peer: socket.socket, request: Message) -> None:
        try:
            reply = self._handle(request)
        except WireError:
            raise
        except Exception as error:
            reply = _refusal(error)
        frame = frame_of(reply)
        with self._lock:  # before it is sent: a peer that has its reply finds it counted
            self._received += request.frame_bytes
            self._sent += frame.num_bytes
            self._by_name[request.name] += request.frame_bytes + frame.num_bytes
        frame.send(peer)


def _refusal(error: Exception) -> Message:
    fields: dict[str, Any] = {"error": type(error).__name__, "why": str(error)}
    return Message("refused", fields)
