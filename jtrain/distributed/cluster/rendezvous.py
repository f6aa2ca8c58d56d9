"""Rendezvous: the processes of a run connect before JAX starts, and compare their facts.

JAX ends a process from C++ if a peer is missing, without naming the peer; so the processes meet
here first. Process 0 listens at the coordinator's address, the others connect and send their number
and their facts, and all get the same answer. Afterwards JAX takes over the port.
"""

import contextlib
import dataclasses
import errno
import json
import os
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress
from jtrain.distributed.cluster.tls import CERTIFICATE, PeerTls
from jtrain.distributed.port_holder import find_port_holder, stop_advice
from jtrain.errors import ConfigError, PeerError
from jtrain.io.regular_files import parse_json

Facts: TypeAlias = Mapping[str, str]
HELLO, MOST = 5.0, 1 << 24  # seconds and bytes that one greeting may take
SHOWN = 12  # facts that an error lists


@dataclasses.dataclass(frozen=True)
class _Visitor:
    """A process that connected, and its greeting."""

    peer: socket.socket
    host: str
    index: int
    processes: int
    facts: Facts


def meet(cluster: Cluster, facts: Facts, *, timeout: float, tls: PeerTls | None = None) -> None:
    """Return in all processes once all have connected and have the same facts.

    Args:
        facts: values by name that must be equal in all processes.
        timeout: seconds.
        tls: certificate of this process; then only processes with a valid one are let in.

    Raises:
        PeerError: if a process does not connect in time, with its number.
        ConfigError: if two processes have one number, or facts differ, with each value.
    """
    if cluster.index:
        _visit(cluster, facts, timeout, tls)
    else:
        _receive(cluster, facts, timeout, tls)


def bind_host(address: CoordinatorAddress) -> str:
    """Return the host at which process 0 listens: the loopback, or the address's interface.

    Empty (every interface) only if the name resolves to the loopback here, as on some machines.
    """
    if address.loopback:
        return "127.0.0.1" if address.host == "localhost" else address.host
    with contextlib.suppress(OSError):
        found = CoordinatorAddress(
            str(socket.getaddrinfo(address.host, None)[0][4][0]), address.port
        )
        return "" if found.loopback else found.host
    return ""


def connect(cluster: Cluster, timeout: float) -> socket.socket:
    """Return a connection to process 0, once it listens.

    Raises:
        PeerError: if it does not listen within `timeout` seconds.
    """
    address, deadline = _address(cluster), time.monotonic() + timeout
    longest = 0.05 if address.loopback else 0.5  # between two attempts; a thousand machines may try
    pause, why = 0.01, "nobody listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            found = socket.create_connection(address, timeout=min(left, HELLO))
            check_peer(found)
            return found
        except socket.gaierror:
            why = f"no machine is named {address.host}"
        except OSError as error:
            why = error.strerror or "no answer"
        time.sleep(min(pause, max(left, 0)))
        pause = min(2 * pause, longest)
    raise PeerError(
        f"process {cluster.index} of {cluster.processes} tried {timeout:g} s to reach process 0 at "
        f"{address} ({why}). Start process 0 there, or name its machine by "
        f"{_variables(cluster)}; a larger parallel.start_timeout waits longer."
    )


def check_peer(connection: socket.socket) -> None:
    """Close a connection of a socket to itself, and raise ConnectionRefusedError.

    The kernel may give the port at which nobody listens to the socket that connects to it.
    """
    try:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except OSError:
        connection.close()
        raise


def _receive(cluster: Cluster, facts: Facts, timeout: float, tls: PeerTls | None) -> None:
    visitors: dict[int, _Visitor] = {}
    refused: list[str] = []
    error: ConfigError | PeerError | None = None
    with contextlib.ExitStack() as stack:
        with contextlib.closing(_accept(stack, cluster, timeout, tls, refused)) as accepted:
            for visitor in accepted:
                error = _invalid(cluster, visitor, visitors)
                visitors[visitor.index if error is None else -1] = visitor
                if error or len(visitors) == cluster.processes - 1:
                    break
        # The listener is closed here: whoever gets an answer finds JAX's listener or none.
        error = error or _missing(cluster, visitors, timeout, refused)
        error = error or _differing(facts, visitors)
        kind = "" if error is None else type(error).__name__
        for visitor in visitors.values():
            with contextlib.suppress(OSError):
                _send(visitor.peer, {"jtrain": kind, "error": str(error or "")})
    if error:
        raise error


def _accept(
    stack: contextlib.ExitStack,
    cluster: Cluster,
    timeout: float,
    tls: PeerTls | None,
    refused: list[str],
) -> Generator[_Visitor, None, None]:
    """Yield the processes that connect in time; drop strangers, and note those without TLS."""
    deadline = time.monotonic() + timeout
    with _listener(cluster) as listener:
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                peer, (host, *_) = listener.accept()
            except TimeoutError:
                return
            peer.settimeout(HELLO)
            if tls is not None:
                try:
                    peer = tls.wrap(peer)
                except OSError as error:
                    refused.append(f"{host} ({error})")
                    peer.close()
                    continue
            stack.enter_context(peer)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                hello = _read(peer)
                index, processes = int(hello["index"]), int(hello["processes"])
                yield _Visitor(peer, host, index, processes, hello["facts"])


def _listener(cluster: Cluster) -> socket.socket:
    address = _address(cluster)
    host = bind_host(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise _listener_error(cluster, error) from None


def _listener_error(cluster: Cluster, error: OSError) -> ConfigError:
    address = _address(cluster)
    by = f"Give it an address of this machine and a free port by {_variables(cluster)}."
    why = error.strerror
    if error.errno == errno.EADDRINUSE:
        holder = find_port_holder(address.port) or "another program"
        why, stop = f"{holder} listens at port {address.port}", stop_advice(holder)
        other = CoordinatorAddress(address.host, _next_free_port(cluster))
        by = f"Set JTRAIN_COORDINATOR={other} for all processes"
        by += f", or stop it: {stop}" if stop else ", or stop it."
    return ConfigError(f"process 0 cannot listen at {address} on this machine ({why}). {by}")


def _next_free_port(cluster: Cluster) -> int:
    """Return the next port above the coordinator's at which no program listens here."""
    address = _address(cluster)
    host = bind_host(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(address.port + 1, min(address.port + 1000, 65536)):
        with socket.socket(family) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                one.bind((host, port))
                return port
    return PORT


def _visit(cluster: Cluster, facts: Facts, timeout: float, tls: PeerTls | None) -> None:
    address, deadline = _address(cluster), time.monotonic() + timeout
    answer, why = None, ""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(connect(cluster, timeout))
        hello = {"index": cluster.index, "processes": cluster.processes, "facts": dict(facts)}
        peer.settimeout(HELLO)
        try:
            peer = stack.enter_context(tls.wrap(peer, host=address.host)) if tls else peer
            _send(peer, hello)
            peer.settimeout(max(deadline - time.monotonic(), 0) + HELLO)
            answer = _read(peer)
        except ssl.SSLError as error:
            why = f", or the certificates do not fit ({getattr(error, 'reason', '') or error})"
        except (OSError, ValueError):
            why = "" if tls else f", or it takes only processes with a certificate ({CERTIFICATE})"
    if not isinstance(answer, dict) or "jtrain" not in answer:
        raise PeerError(
            f"process {cluster.index} of {cluster.processes} connected to {address} and got no "
            f"valid answer: process 0 ended, or another program has that port{why}. Read the "
            f"output of process 0; set {_variables(cluster)} to a free port."
        )
    if answer["jtrain"]:
        raise {"ConfigError": ConfigError}.get(answer["jtrain"], PeerError)(answer["error"])


def _invalid(
    cluster: Cluster, visitor: _Visitor, visitors: Mapping[int, _Visitor]
) -> ConfigError | PeerError | None:
    """Return what is wrong with a visitor, if anything."""
    if visitor.processes != cluster.processes:
        return ConfigError(
            f"process 0 was started as one of {cluster.processes}, and process {visitor.index} "
            f"(from {visitor.host}) as one of {visitor.processes}. Set the same number for all: "
            f"{_variables(cluster)}."
        )
    if visitor.index in visitors or not 0 < visitor.index < cluster.processes:
        other = visitors[visitor.index].host if visitor.index in visitors else "here"
        return ConfigError(
            f"two processes are both process {visitor.index} of {cluster.processes}: one from "
            f"{visitor.host}, one from {other}. Give each its own number: {_variables(cluster)}."
        )
    return None


def _missing(
    cluster: Cluster, visitors: Mapping[int, _Visitor], timeout: float, refused: list[str]
) -> PeerError | None:
    missing = [i for i in range(1, cluster.processes) if i not in visitors]
    if not missing:
        return None
    named = ", ".join(map(str, missing[:SHOWN])) + ", ..." * (len(missing) > SHOWN)
    return PeerError(
        f"{len(visitors) + 1} of {cluster.processes} processes reached {cluster.coordinator} "
        f"within {timeout:g} s; process {named} did not. Start "
        f"{'it' if len(missing) == 1 else 'them'} with the same {_variables(cluster)} and its own "
        f"number, or set a larger parallel.start_timeout={2 * timeout:g}."
        + (
            f" Turned away without a valid certificate: {', '.join(refused[:SHOWN])}; set "
            f"{CERTIFICATE} and its key and authority for all."
            if refused
            else ""
        )
    )


def _differing(facts: Facts, visitors: Mapping[int, _Visitor]) -> ConfigError | None:
    """Return the facts in which the first differing process differs."""
    for index, visitor in sorted(visitors.items()):
        if error := difference(facts, visitor.facts, index, f" (from {visitor.host})"):
            return error
    return None


def difference(facts: Facts, other: Facts, index: int, where: str = "") -> ConfigError | None:
    """Return the facts in which a process differs from process 0; None if they are equal.

    Args:
        facts: those of process 0.
        other: those of the other process.
        index: its number.
        where: its place, for the message.
    """
    names = [name for name in {**facts, **other} if facts.get(name) != other.get(name)]
    if not names:
        return None
    rows = [
        f"  {name}: {facts.get(name, 'none')} in process 0, {other.get(name, 'none')} in process "
        f"{index}"
        for name in names[:SHOWN]
    ]
    rows += [f"  and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
    return ConfigError(
        f"process {index}{where} differs from process 0:\n"
        + "\n".join(rows)
        + "\nStart all of them by the same command, from the same files and packages."
    )


def _address(cluster: Cluster) -> CoordinatorAddress:
    assert cluster.coordinator is not None, "several processes have a coordinator"
    return cluster.coordinator


def _variables(cluster: Cluster) -> str:
    return ", ".join(cluster.by) or "JTRAIN_COORDINATOR"


def _send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _read(peer: socket.socket) -> Any:
    with peer.makefile("rb") as stream:
        return parse_json(stream.readline(MOST))
