"""Rendezvous: the processes of a run connect before JAX starts, and compare their facts.

JAX ends a process from C++ if a peer is missing, without naming the peer; so the processes meet
here first. Process 0 listens at the coordinator's address, the others connect and send their number
and their facts, and all get the same answer. Afterwards JAX takes over the port.
"""

import contextlib
import errno
import hmac
import json
import logging
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress
from jtrain.distributed.cluster.greetings import MOST, Greeting, read_greetings
from jtrain.distributed.cluster.tls import CERTIFICATE, PeerTls
from jtrain.distributed.port import find_port_holder, stop_advice
from jtrain.errors import ConfigError, PeerError
from jtrain.io.formatting import escape_controls
from jtrain.io.regular_files import parse_json

Facts: TypeAlias = Mapping[str, str]
HELLO = 5.0  # seconds for an answer that is due at once
SHOWN = 12  # facts that an error lists, and visitors that were turned away
OPEN_FILES = 1 << 16  # that a process may have, as far as the system allows
OTHER_FILES = 64  # of those, beside the connections to the other processes
ATTEMPTS = 5  # of a greeting whose connection is lost
TOKEN = "JTRAIN_TOKEN"
_log = logging.getLogger(__name__)


def meet(
    cluster: Cluster, facts: Facts, *, timeout: float, tls: PeerTls | None = None, token: str = ""
) -> None:
    """Return in all processes once all have connected and have the same facts.

    A visitor that does not fit is told so and turned away; process 0 waits on, since anybody who
    reaches its port may claim to be one of the processes. With a token nobody else may.

    Args:
        facts: values by name that must be equal in all processes.
        timeout: seconds.
        tls: certificate of this process; then only processes with a valid one are let in.
        token: secret of the run; then only processes with the same one are let in.

    Raises:
        PeerError: if a process does not connect in time, with its number and who was turned away.
        ConfigError: in a process that does not fit: its number is taken, or its facts differ.
    """
    if cluster.index:
        _visit(cluster, facts, timeout, tls, token)
    else:
        _receive(cluster, facts, timeout, tls, token)


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


def _receive(
    cluster: Cluster, facts: Facts, timeout: float, tls: PeerTls | None, token: str
) -> None:
    visitors: dict[int, Greeting] = {}
    refused: dict[str, None] = {}
    _allow_open_files(cluster)
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        with (
            _listener(cluster) as listener,
            contextlib.closing(read_greetings(listener, deadline, tls)) as greetings,
        ):
            for greeting in greetings:
                stack.enter_context(greeting.peer)
                try:
                    index, error = _examine(cluster, greeting, facts, visitors, token)
                except (ValueError, KeyError, TypeError, OverflowError):
                    greeting.peer.close()  # it is no process of jtrain
                    continue
                if error is None:
                    visitors[index] = greeting._replace(content={})
                    if len(visitors) == cluster.processes - 1:
                        break
                    continue
                _answer(greeting.peer, error)
                greeting.peer.close()
                why = escape_controls(str(error))  # what a stranger says reaches a terminal
                if why not in refused and len(refused) < SHOWN:
                    refused[why] = None
                    _log.warning("turned away: %s", why)
        # The listener is closed here: whoever gets an answer finds JAX's listener or none.
        missing = _missing(cluster, visitors, timeout, [*refused])
        for visitor in visitors.values():
            _answer(visitor.peer, missing)
    if missing:
        raise missing


def _answer(peer: socket.socket, error: Exception | None) -> None:
    """Tell a visitor that all have come, or the error; it is small enough to be sent at once."""
    with contextlib.suppress(OSError):
        peer.settimeout(HELLO)
        kind = "" if error is None else type(error).__name__
        _send(peer, {"jtrain": kind, "error": str(error or "")})


def _examine(
    cluster: Cluster, greeting: Greeting, facts: Facts, visitors: Mapping[int, Greeting], token: str
) -> tuple[int, ConfigError | None]:
    """Return the number of a visitor, and why it is none of this run's processes, if it is not."""
    hello, host = greeting.content, greeting.host
    if isinstance(hello, ssl.SSLError):
        return 0, ConfigError(
            f"{host} without a valid certificate ({hello}); set {CERTIFICATE} and its key and "
            f"authority for all."
        )
    index, processes = int(hello["index"]), int(hello["processes"])
    if not hmac.compare_digest(str(hello.get("token", "")).encode(), token.encode()):
        return index, ConfigError(
            f"the {TOKEN} of a process from {host} is not that of process 0. Set the same for all "
            f"processes, or unset it."
        )
    if processes != cluster.processes:
        return index, ConfigError(
            f"process 0 was started as one of {cluster.processes}, and process {index} "
            f"(from {host}) as one of {processes}. Set the same number for all: "
            f"{_variables(cluster)}."
        )
    known = index in visitors and not _is_gone(visitors[index].peer)
    if known or not 0 < index < cluster.processes:
        other = visitors[index].host if known else "here"
        return index, ConfigError(
            f"two processes are both process {index} of {cluster.processes}: one from "
            f"{host}, one from {other}. Give each its own number: {_variables(cluster)}."
        )
    return index, difference(facts, dict(hello["facts"]), index, f" (from {host})")


def _is_gone(peer: socket.socket) -> bool:
    """Return whether a visitor has closed its connection: it greets again over another."""
    try:
        return not peer.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def _allow_open_files(cluster: Cluster) -> None:
    """Raise the limit of open files: a connection takes one, also those of JAX, and of strangers.

    Raises:
        ConfigError: if the system allows too few for the processes.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    most, need = max(soft, min(hard, OPEN_FILES)), cluster.processes + OTHER_FILES
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    if most < need:
        raise ConfigError(
            f"process 0 of {cluster.processes} needs {need} open files, one for each process, and "
            f"may open {most}. Raise the limit before it starts: ulimit -n {need} (as root, or "
            f"docker run --ulimit nofile={need})."
        )


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


def _visit(cluster: Cluster, facts: Facts, timeout: float, tls: PeerTls | None, token: str) -> None:
    address, deadline = _address(cluster), time.monotonic() + timeout
    hello = {"index": cluster.index, "processes": cluster.processes, "facts": dict(facts)}
    line, why, wait = b"", "", timeout
    for _ in range(ATTEMPTS):
        try:
            with contextlib.ExitStack() as stack:
                peer = stack.enter_context(connect(cluster, wait))
                peer.settimeout(HELLO)
                peer = stack.enter_context(tls.wrap(peer, host=address.host)) if tls else peer
                _send(peer, {**hello, "token": token})
                peer.settimeout(max(deadline - time.monotonic(), 0) + HELLO)
                line = stack.enter_context(peer.makefile("rb")).readline(MOST)
        except PeerError:
            if wait == timeout:
                raise
            break
        except ssl.SSLError as error:
            why = f", or the certificates do not fit ({getattr(error, 'reason', '') or error})"
            break
        except OSError:
            why = "" if tls else f", or it takes only processes with a certificate ({CERTIFICATE})"
        wait = min(max(deadline - time.monotonic(), 0), HELLO)
        if line or not wait:
            break
    answer = None
    with contextlib.suppress(ValueError):
        answer = parse_json(line)
    if not isinstance(answer, dict) or "jtrain" not in answer:
        raise PeerError(
            f"process {cluster.index} of {cluster.processes} connected to {address} and got no "
            f"valid answer: process 0 ended, or another program has that port{why}. Read the "
            f"output of process 0; set {_variables(cluster)} to a free port."
        )
    if answer["jtrain"]:
        raise {"ConfigError": ConfigError}.get(answer["jtrain"], PeerError)(answer["error"])


def _missing(
    cluster: Cluster, visitors: Mapping[int, Greeting], timeout: float, refused: list[str]
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
        + "".join(f"\nTurned away: {why}" for why in refused)
    )


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
