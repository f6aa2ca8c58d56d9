"""Greetings: a line of JSON from each of many connections, none of which holds up another.

Whoever reaches the port may connect, and say nothing, or a byte each second, or connect a thousand
times. So each connection has `SECONDS` in all for its line, the oldest one gives way to a new one,
and what is no greeting is closed at once.
"""

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Generator
from typing import Any, NamedTuple

from jtrain.distributed.cluster.tls import PeerTls
from jtrain.errors import ConfigError
from jtrain.io.regular_files import parse_json

SECONDS, MOST = 5.0, 1 << 22  # that one greeting may take, and its bytes
GUESTS = 64  # connections at a time that have not greeted


class Greeting(NamedTuple):
    """A connection, its host, and what it said: an error if it has no valid certificate."""

    peer: socket.socket
    host: str
    content: dict[str, Any] | ssl.SSLError


class _Guest(NamedTuple):
    peer: socket.socket
    host: str
    deadline: float
    data: bytearray


def read_greetings(
    listener: socket.socket, deadline: float, tls: PeerTls | None
) -> Generator[Greeting, None, None]:
    """Yield the greetings at a port until `deadline`; with `tls` a peer needs a certificate."""
    guests: dict[Any, _Guest] = {}  # by connection, the oldest first
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(lambda: [guest.peer.close() for guest in guests.values()])
        selector.register(listener, selectors.EVENT_READ)
        while (now := time.monotonic()) < deadline:
            oldest, is_full = next(iter(guests.values()), None), False
            until = min(deadline, oldest.deadline) if oldest else deadline
            for key, _ in selector.select(max(until - now, 0)):
                if key.fileobj is listener:
                    guest = _accept(listener, tls)
                    is_full = guest is None or len(guests) >= GUESTS
                    if guest is not None:
                        guests[guest.peer] = guest
                        selector.register(guest.peer, selectors.EVENT_READ)
                elif guest := guests.get(key.fileobj):
                    content = _read(guest, tls)
                    if content is not None:
                        selector.unregister(guests.pop(guest.peer).peer)
                        yield Greeting(guest.peer, guest.host, content)
            if oldest and oldest.peer in guests and (is_full or oldest.deadline <= now):
                selector.unregister(guests.pop(oldest.peer).peer)
                oldest.peer.close()


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


def _read(guest: _Guest, tls: PeerTls | None) -> dict[str, Any] | ssl.SSLError | None:
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
    except ssl.SSLError as error:
        return error
    except (OSError, ValueError):
        return {}
