"""Listener: answers the requests of peers that know the token."""

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable
from typing import Any

from jtrain.errors import ConfigError
from jtrain.server.wire import Message, VersionError, WireError, receive, send

LOOPBACK = "127.0.0.1"
GREETING = 10.0  # seconds within which a peer says who it is
Handler = Callable[[Message], Message]


class Listener:
    """Server of requests, in a `with` block; each peer has a thread.

    Args:
        handle: returns the reply to a request; an exception is sent to the peer in words.
        token: that a peer must know; compared in constant time.
        most: bytes of the arrays of a request.
        port: of the loopback; 0: a free one.

    Raises:
        ConfigError: if the port is in use.
    """

    def __init__(self, handle: Handler, *, token: str, most: int, port: int = 0):
        self._handle, self._token, self._most = handle, token, most
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"parallel.port={port} is not available ({error.strerror}). Set parallel.port=0 to "
                f"use a free one."
            ) from None
        self._socket.listen()
        self._peers: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        self.received = self.sent = 0
        """Bytes of arrays so far."""
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
                return  # closed
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                self._peers.add(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):  # the peer is gone
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._greet(peer):
                while True:
                    self._answer(peer, receive(peer, self._most))
        with self._lock:
            self._peers.discard(peer)
        peer.close()

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
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            send(peer, _refusal(PermissionError("the token is not that of this run")))
            return False
        send(peer, Message("welcome"))
        peer.settimeout(None)  # a peer may compute for long between two requests
        return True

    def _answer(self, peer: socket.socket, request: Message) -> None:
        try:
            reply = self._handle(request)
        except WireError:
            raise
        except Exception as error:
            reply = _refusal(error)
        with self._lock:
            self.received += request.num_bytes
            self.sent += reply.num_bytes
        send(peer, reply)


def _refusal(error: Exception) -> Message:
    fields: dict[str, Any] = {"error": type(error).__name__, "why": str(error)}
    return Message("refused", fields)
