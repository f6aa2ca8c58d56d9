"""Client: sends requests to a listener, again after a lost connection, until a deadline."""

import contextlib
import socket
import time
from collections.abc import Sequence

from jtrain.errors import ConfigError, PeerError
from jtrain.server.listener import LOOPBACK
from jtrain.server.wire import Message, VersionError, receive, send

RETRY = 0.1  # seconds between two attempts to connect


class SilentError(PeerError):
    """A peer has the request, and does not answer."""

    def __init__(self, client: "Client", seconds: float):
        super().__init__(f"{client.name} did not answer within {seconds:g} s")
        self.client = client


class RefusedError(Exception):
    """The peer does not do what it was asked, and says why."""


class Client:
    """Connection to a listener of the loopback, made when it is first used.

    A request is sent again if its connection is lost, so every request must be one that may be
    answered twice.

    Args:
        name: of the peer, for messages.
        token: of the run.
        most: bytes of the arrays of a reply.
        timeout: seconds that a reply may take.
        patience: seconds in which a lost connection is tried again; by default `timeout`.
    """

    def __init__(
        self,
        name: str,
        port: int,
        *,
        token: str,
        most: int,
        timeout: float,
        patience: float | None = None,
    ):
        self.name, self.port, self._token = name, port, token
        self._most, self._timeout = most, timeout
        self._patience = timeout if patience is None else patience
        self._connection: socket.socket | None = None

    def call(self, request: Message) -> Message:
        """Return the reply to a request.

        Raises:
            PeerError: if there is none within the deadline.
            RefusedError: if the peer refuses, with its words.
            ConfigError: if it has another version or another token.
        """
        return call_all([self], [request])[0]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, request: Message) -> bool:
        """Send a request over the connection; return whether there is one."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.settimeout(self._timeout)
            send(self._connection, request)
            return True
        except OSError as error:
            self._lost(error)
            return False

    def _receive(self) -> Message | None:
        """Return the reply; None if the connection is lost."""
        if self._connection is None:
            return None
        try:
            reply = receive(self._connection, self._most)
        except (OSError, EOFError) as error:
            self._lost(error)
            return None
        if reply.name == "refused":
            raise RefusedError(f"{self.name}: {reply.fields.get('why')}")
        return reply

    def _lost(self, error: Exception) -> None:
        self.close()
        if isinstance(error, VersionError):
            raise ConfigError(f"{self.name}: {error}") from None
        if isinstance(error, TimeoutError):  # it is there and does not answer
            raise SilentError(self, self._timeout) from None

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((LOOPBACK, self.port), timeout=self._timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(connection, Message("hello", {"token": self._token}))
            reply = receive(connection, 0)
        except (OSError, EOFError):
            connection.close()
            raise
        if reply.name != "welcome":
            connection.close()
            raise ConfigError(
                f"{self.name} at port {self.port} refuses this process: {reply.fields.get('why')}. "
                f"Another run listens there: set parallel.port=0."
            )
        return connection


def call_all(clients: Sequence[Client], requests: Sequence[Message]) -> list[Message]:
    """Return the reply of each client to its request, which they work on at the same time.

    Raises:
        PeerError, RefusedError, ConfigError: as `Client.call`.
    """
    sent = [each._send(request) for each, request in zip(clients, requests, strict=True)]
    replies: list[Message] = []
    error: Exception | None = None
    for client, request, there in zip(clients, requests, sent, strict=True):
        try:
            replies.append(_finish(client, request, there))
        except Exception as found:  # the replies of the others are read all the same
            error = error or found
    if error is not None:
        raise error
    return replies


def _finish(client: Client, request: Message, sent: bool) -> Message:
    end = time.monotonic() + client._patience
    while True:
        reply = client._receive() if sent else None
        if reply is not None:
            return reply
        if time.monotonic() > end:
            raise PeerError(f"{client.name} is not there: no answer in {client._patience:g} s")
        time.sleep(RETRY)
        sent = client._send(request)


@contextlib.contextmanager
def closing(clients: Sequence[Client]):
    """Close the clients after the block."""
    try:
        yield clients
    finally:
        for each in clients:
            each.close()
