"""Greetings: a line of JSON from each of many connections, none of which holds up another.

Whoever reaches the port may connect, and say nothing, or a byte each second, or connect a thousand
times. So each connection has `SECONDS` in all for its line, the oldest one gives way to a new one,
and what is no greeting is closed at once.
"""

import math
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from jtrain.distributed.cluster.tls import PeerTls
from jtrain.errors import ConfigError
from jtrain.io.regular_files import parse_json

SECONDS, MOST = 5.0, 1 << 22  # that one greeting may take, and its bytes
GUESTS = 64  # connections at a time that have not greeted


class Greeting(NamedTuple):
    """A connection, its host and what it said."""

    peer: socket.socket
    host: str
    content: dict[str, Any]


class _Guest(NamedTuple):
    peer: socket.socket
    host: str
    deadline: float
    data: bytearray


def read_greetings(
    listener: socket.socket,
    deadline: float,
    tls: PeerTls | None,
    refuse: Callable[[str, Exception], object],
) -> Generator[Greeting, None, None]:
    """Yield the greetings at a port until a moment of the monotonic clock.

    Args:
        tls: certificate of this process; then each connection has to have one.
        refuse: takes the host that has none, and the error.
    """
    guests = _Guests()
    listener.setblocking(False)
    guests.selector.register(listener, selectors.EVENT_READ)
    with guests.selector:
        try:
            while (now := time.monotonic()) < deadline:
                until = guests.close_late(now)
                for key, _ in guests.selector.select(min(deadline, until) - now):
                    if key.fileobj is listener:
                        guests.add(_accept(listener, tls))
                    elif guest := guests.of.get(key.fileobj):
                        content = _read(guest, tls, refuse)
                        if content:
                            yield Greeting(guests.take(guest.peer), guest.host, content)
                        elif content is not None:
                            guests.take(guest.peer).close()
        finally:
            for peer in guests.of:
                peer.close()


class _Guests:
    """Connections that have not greeted, the oldest first."""

    def __init__(self):
        self.of: dict[Any, _Guest] = {}
        self.selector = selectors.DefaultSelector()

    def add(self, guest: _Guest | None) -> None:
        """Add a connection, in the place of the oldest if there are many, or no file was left."""
        if self.of and (guest is None or len(self.of) >= GUESTS):
            self.take(next(iter(self.of))).close()
        if guest is not None:
            self.of[guest.peer] = guest
            self.selector.register(guest.peer, selectors.EVENT_READ)

    def take(self, peer: socket.socket) -> socket.socket:
        """Remove a connection and return it."""
        del self.of[peer]
        self.selector.unregister(peer)
        return peer

    def close_late(self, now: float) -> float:
        """Close those whose time is over; return when that of the next one is."""
        for guest in [guest for guest in self.of.values() if guest.deadline <= now]:
            self.take(guest.peer).close()
        return min((guest.deadline for guest in self.of.values()), default=math.inf)


def _accept(listener: socket.socket, tls: PeerTls | None) -> _Guest | None:
    """Return a new connection; None if there is none, or no file left for it."""
    try:
        peer, (host, *_) = listener.accept()
        peer.setblocking(False)
        peer = tls.wrap(peer) if tls is not None else peer
    except (OSError, ConfigError) as error:
        if not isinstance(error, BlockingIOError):
            time.sleep(0.01)  # its file is free again soon: the oldest connection is closed
        return None
    return _Guest(peer, host, time.monotonic() + SECONDS, bytearray())


def _read(
    guest: _Guest, tls: PeerTls | None, refuse: Callable[[str, Exception], object]
) -> dict[str, Any] | None:
    """Return the JSON of the line that was sent; None before its end, {} if it is no greeting."""
    part = b"-"
    try:
        if tls is not None and isinstance(guest.peer, ssl.SSLSocket) and not guest.data:
            guest.peer.do_handshake()  # does nothing once it is done
            tls.check(guest.peer)
        while part and not part.endswith(b"\n") and len(guest.data) <= MOST:
            part = guest.peer.recv(1 << 16)
            guest.data.extend(part)
        content = parse_json(bytes(guest.data[: MOST + 1]))
        return content if isinstance(content, dict) else {}
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, ssl.SSLError):
            refuse(guest.host, error)
        return {}
