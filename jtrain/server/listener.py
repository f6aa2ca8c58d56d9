"""Listener: answers the requests of peers that know the token. Registry: where servers listen."""

import collections
import contextlib
import errno
import hmac
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.distributed.cluster.tls import PeerTls
from jtrain.errors import ConfigError
from jtrain.server.wire import BufferPool, Message, WireError, encode, receive, send

RETRY = 0.05  # seconds after a connection that could not be accepted
GREETING = 10.0  # seconds within which a peer says who it is
WATCH = 1.0  # seconds after which a watching server is told to ask again
STRANGERS = 64  # peers at a time that have not said so; the oldest gives way
SENDING = 0.1  # seconds for the last replies
Handler = Callable[[Message], Message]


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
        tls: certificate of this process; peers then need one, and all is encrypted.

    Raises:
        ConfigError: if the port is in use, or the host is not an address of this machine.
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
        tls: PeerTls | None = None,
    ):
        self._handle, self._token, self._most, self._lost = handle, token, most, lost
        self._timeout, self._tls = timeout, tls
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen()  # another one may have begun to since
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE and host not in {"", LOOPBACK}:
                raise ConfigError(
                    f"parallel.host={host} is not an address of this machine ({error.strerror}). "
                    f"Set parallel.host to one that the other machines reach, such as one that ip "
                    f"addr prints, or to {LOOPBACK}."
                ) from None
            raise ConfigError(
                f"parallel.port={port} is not available ({error.strerror}). Set parallel.port=0 to "
                f"use a free one."
            ) from None
        self.received = self.sent = 0
        """Bytes of whole frames so far."""
        self.by_name: collections.Counter[str] = collections.Counter()
        """Bytes of requests and their replies, by the name of the request."""
        self._peers: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._pool = BufferPool()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Port that it listens at."""
        return self._socket.getsockname()[1]

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
        connection = peer
        try:
            keep_alive(peer)
            peer.settimeout(GREETING)
            if self._tls:  # of a duplicate: `peer` stays a socket that others can shut down
                connection = self._tls.wrap(peer.dup())
            is_known = self._greet(connection)
            with self._lock:
                self._strangers.pop(peer, None)
            while is_known:
                _await_bytes(connection)  # it may compute for long between two requests
                connection.settimeout(self._timeout)
                request = receive(connection, self._most, self._pool)
                last = Message(request.name, request.fields)  # without its arrays
                self._answer(connection, request)
                del request  # so that its buffer is free for the next
        except OSError:
            pass  # the peer is gone, or has no certificate
        finally:
            connection.close()
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
        """Return whether the peer has the token."""
        hello = receive(peer, 0)
        token = hello.fields.get("token")
        token = token if hello.name == "hello" and isinstance(token, str) else ""
        known = hmac.compare_digest(token.encode(errors="replace"), self._token.encode())
        refusal = Message("refused", {"why": "the token is not that of this run"})
        send(peer, Message("welcome") if known else refusal)
        return known

    def _answer(self, peer: socket.socket, request: Message) -> None:
        try:
            reply = self._handle(request)
        except WireError:
            raise
        except Exception as error:
            reply = Message("refused", {"why": str(error)})
        frame = encode(reply)
        size = sum(map(len, frame))
        with self._lock:  # before it is sent: a peer that has its reply finds it counted
            self.received += request.frame_bytes
            self.sent += size
            self.by_name[request.name] += request.frame_bytes + size
        for buffer in frame:
            peer.sendall(buffer)


def _await_bytes(connection: socket.socket) -> None:
    """Wait until there is something to read, or the connection has ended."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
    except ValueError:
        raise ConnectionError("it was closed here") from None
    poll.poll()


class Registry:
    """Registry of the servers' addresses, in the run's own process.

    A server listens at a port that is free on its machine and reports its address; workers ask for
    it at each connection. So a server that was started again may be on another machine.
    """

    def __init__(self, shards: int):
        self._shards = shards
        self._changed = threading.Condition()
        self._servers: dict[int, Mapping[str, Any]] = {}  # reports, by shard
        self._ended = False

    def handle(self, request: Message) -> Message | None:
        """Answer a request that is about addresses; None if it is about something else."""
        if request.name not in {"register", "where", "watch"}:
            return None
        shard = request.fields["shard"]
        if not isinstance(shard, int) or not 0 <= shard < self._shards:
            raise ValueError(f"there is no server {shard!r}")
        with self._changed:
            if request.name == "where":
                return Message("there", self._servers.get(shard, {}))
            if request.name == "register":
                self._servers[shard] = request.fields
                self._changed.notify_all()
                return Message("registered")
            over = lambda: self._ended or self.find(shard) != request.fields
            return Message("end" if self._changed.wait_for(over, WATCH) else "wait")

    def find(self, shard: int) -> Mapping[str, Any] | None:
        """Return what the server of a shard has reported; None before it has."""
        return self._servers.get(shard)

    def locate(self, shard: int) -> tuple[str, int]:
        """Return host and port of a shard.

        Raises:
            ConnectionError: if it has reported none yet.
        """
        return read_address(shard, self.find(shard))

    def dismiss(self, shard: int) -> None:
        """Let the process of a shard end."""
        with self._changed:
            self._servers.pop(shard, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Tell the servers that the run ends."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        time.sleep(SENDING)


def read_address(shard: int, fields: Mapping[str, Any] | None) -> tuple[str, int]:
    """Return host and port in a report of a server.

    Raises:
        ConnectionError: if it has reported none yet.
    """
    if not fields:
        raise ConnectionError(f"server {shard} has not reported its address")
    return fields["host"], fields["port"]
