"""Clients of listeners, and the calls of the coordinator to all servers.

A client sends requests to a listener, again after a lost connection, until a deadline.
"""

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.distributed.cluster.rendezvous import check_peer
from jtrain.distributed.cluster.tls import CERTIFICATE, PeerTls
from jtrain.errors import ConfigError, PeerError
from jtrain.server.listener import keep_alive
from jtrain.server.wire import BufferPool, Message, receive, send

RETRY = 0.1  # seconds between two attempts to connect
Locate = Callable[[], tuple[str, int]]
"""Function that returns host and port of a peer; an OSError says that it is nowhere yet."""


class RefusedError(Exception):
    """The peer does not do what it was asked, and says why."""


class Client:
    """Connection to a listener, made when it is first used.

    A request is sent again if its connection is lost or its answer is late, so every request must
    be one that may be answered twice.

    Args:
        address: port of the loopback, or a function that is called for each connection.
        most: bytes of the arrays of a reply.
        timeout: seconds that a reply may take.
        tls: certificate of this process, by which it encrypts; None: nothing is encrypted.
        patience: seconds in which a request is sent again; by default `timeout`.
        reuse: keep the memory of large replies for the next ones.
    """

    def __init__(
        self,
        name: str,
        address: int | Locate,
        *,
        token: str,
        most: int,
        timeout: float,
        patience: float | None = None,
        reuse: bool = True,
        tls: PeerTls | None = None,
    ):
        self.name, self._token, self._tls = name, token, tls
        self._locate = (lambda: (LOOPBACK, address)) if isinstance(address, int) else address
        self._most, self._timeout = most, timeout
        self.patience = timeout if patience is None else patience
        self.is_silent = False
        """Whether a reply was late, or there was none for as long as the patience lasts."""
        self._connection: socket.socket | None = None
        self._due = False  # a reply is
        self._pool = BufferPool() if reuse else None

    def call(self, request: Message) -> Message:
        """Return the reply to a request.

        Raises:
            PeerError: if there is none within the deadline.
            RefusedError: if the peer refuses, with its words.
            ConfigError: if it has another token, or no certificate that fits.
        """
        return call_all([self], [request])[0]

    @property
    def local_host(self) -> str:
        """Address of this machine by which it has called the peer."""
        assert self._connection is not None, "it was called"
        return self._connection.getsockname()[0]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, request: Message) -> None:
        """Send a request, if there is a connection or one can be made."""
        if self._due:  # the call before was interrupted: its reply is not that of this one
            self.close()
        self._due = True
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.settimeout(self._timeout)
            send(self._connection, request)
        except OSError as error:
            self._lose(error)

    def _receive(self) -> Message | None:
        """Return the reply; None if the connection is lost."""
        if self._connection is None:
            return None
        try:
            reply = receive(self._connection, self._most, self._pool)
        except OSError as error:
            self._lose(error)
            return None
        self._due = self.is_silent = False
        if reply.name == "refused":
            raise RefusedError(f"{self.name}: {reply.fields.get('why')}")
        return reply

    def _lose(self, error: OSError) -> None:
        self.is_silent |= isinstance(error, TimeoutError)  # it is there and does not answer
        self.close()

    def _finish(self, request: Message, end: float, meanwhile: Callable[[], None]) -> Message:
        """Return the reply to a request that was sent, and is sent again until `end`."""
        while (reply := self._receive()) is None:
            late, silent = time.monotonic() > end, self.is_silent
            self.is_silent |= late
            meanwhile()
            if late and silent:
                raise PeerError(f"{self.name} did not answer within {self._timeout:g} s")
            if late:
                raise PeerError(f"{self.name} is not there: no answer in {self.patience:g} s")
            time.sleep(RETRY)
            self._send(request)
        return reply

    def _connect(self) -> socket.socket:
        host, port = self._locate()
        connection = socket.create_connection((host, port), timeout=self._timeout)
        try:
            check_peer(connection)
            keep_alive(connection)
            connection = self._tls.wrap(connection, host=host) if self._tls else connection
            send(connection, Message("hello", {"token": self._token}))
            reply = receive(connection, 0)
        except OSError as error:
            connection.close()
            certificates = r"CERTIFICATE|_CA\b|_CERT"  # another attempt would fail too
            if isinstance(error, ssl.SSLError) and re.search(certificates, error.reason or ""):
                raise ConfigError(
                    f"{self.name} at {host}:{port} and this process do not take each other's "
                    f"certificates ({error.reason}). Give all processes of the run certificates "
                    f"by one authority, which name their hosts ({CERTIFICATE})."
                ) from None
            raise
        if reply.name != "welcome":
            connection.close()
            raise ConfigError(
                f"{self.name} at port {port} refuses this process: {reply.fields.get('why')}. "
                f"Another run listens there: set parallel.port=0."
            )
        return connection


def call_all(
    clients: Sequence[Client],
    requests: Sequence[Message],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Message]:
    """Return the reply of each client to its request, which they work on at the same time.

    Args:
        meanwhile: called before each further attempt.

    Raises:
        PeerError, RefusedError, ConfigError: as `Client.call`.
    """
    ends = [time.monotonic() + each.patience for each in clients]
    for client, request in zip(clients, requests, strict=True):
        client._send(request)
    return [
        client._finish(request, end, meanwhile)
        for client, request, end in zip(clients, requests, ends, strict=True)
    ]


@contextlib.contextmanager
def closing(clients: Sequence[Client]):
    """Close the clients after the block."""
    try:
        yield clients
    finally:
        for each in clients:
            each.close()


class ShardsLostError(Exception):
    """State was lost with a process, so that the step begins again from the snapshot."""


class ShardCalls:
    """The shards of a run, which one thread calls.

    Args:
        supervise: called where one does not answer; it starts those that died again, and says by
            `lost` which.
    """

    def __init__(self, clients: Sequence[Client], supervise: Callable[[], None]):
        self._clients, self._supervise = clients, supervise
        self.lost: set[int] = set()
        """Shards that were started again, and hold nothing."""

    def __len__(self) -> int:
        return len(self._clients)

    def check(self) -> None:
        """Raise if a shard was lost.

        Raises:
            ShardsLostError: if one was.
        """
        self._supervise()
        if self.lost:
            raise ShardsLostError

    def take_lost(self) -> list[int]:
        """Return the shards that were lost, and forget that they were."""
        lost, self.lost = sorted(self.lost), set()
        return lost

    def take_silent(self) -> list[int]:
        """Return the shards that did not answer, and forget that they did not."""
        silent = [shard for shard, client in enumerate(self._clients) if client.is_silent]
        for shard in silent:
            self._clients[shard].is_silent = False
        return silent

    def call_all(self, name: str, fields: dict[str, Any]) -> list[Message]:
        """Return the replies of all shards.

        Raises:
            ShardsLostError: if one died, and was started again.
            PeerError: if one does not come back.
            RefusedError: if one refuses.
        """
        return self._call(self._clients, [Message(name, fields)] * len(self._clients))

    def load(self, requests: dict[int, Message]) -> None:
        """Load some shards, until it succeeds; one of the others may be lost meanwhile."""
        clients = [self._clients[shard] for shard in requests]
        while True:
            try:
                self._call(clients, list(requests.values()))
                return
            except ShardsLostError:  # one that is loaded here, or else is restored later
                self.lost -= set(requests)

    def _call(self, clients: Sequence[Client], requests: Sequence[Message]) -> list[Message]:
        try:
            return call_all(clients, requests, self.check)
        except RefusedError:
            self.check()  # one that was started again knows nothing of the step
            raise
