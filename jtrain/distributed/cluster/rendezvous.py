"""Rendezvous: the processes of a run connect before JAX starts, and compare their facts.

JAX ends a process from C++ if a peer is missing, without naming the peer; so the processes meet
here first. Process 0 listens at the coordinator's address, the others connect and send their number
and their facts, and all get the same answer. Afterwards JAX takes over the port.
"""

import contextlib
import errno
import faulthandler
import hmac
import json
import logging
import os
import queue
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress, Facts, difference
from jtrain.distributed.cluster.tls import CERTIFICATE, PeerTls, takes_certificates
from jtrain.distributed.heartbeat import HEARTBEAT, connect_heartbeat
from jtrain.distributed.port import find_port_holder, free_port
from jtrain.distributed.shutdown import fail_alone
from jtrain.errors import ConfigError, PeerError
from jtrain.io.formatting import escape_controls
from jtrain.io.regular_files import parse_json

HELLO = 5.0  # seconds for an answer that is due at once
LONGEST = 1 << 22  # bytes of a greeting
POLL = 0.02  # seconds between two looks for greetings
SHOWN = 12  # visitors that were turned away, in an error
OPEN_FILES = 1 << 16  # that process 0 may have, where the system allows it
TOKEN = "JTRAIN_TOKEN"
# Seconds after which JAX takes a process for dead. JAX's default of 100 keeps the others waiting
# that long; a C++ thread sends the heartbeats, and a busy Python does not delay it.
HEARTBEAT_TIMEOUT = 30
# A day under `jtrain launch`, which notices by itself which process died or was stopped: JAX would
# end all others by SIGABRT, without their stacks and without the number of the stopped process.
WATCHED_TIMEOUT = 24 * 3600
_log = logging.getLogger(__name__)


def start(cluster: Cluster, facts: Facts, *, timeout: float) -> None:
    """Join the processes of a cluster; call it once, before JAX knows its devices.

    From then on an uncaught error ends this process without waiting for the others.

    Args:
        facts: values by name that must be equal in all processes.
        timeout: seconds to wait for all processes.

    Raises:
        PeerError: if a process does not connect.
        ConfigError: if the processes differ, JAX was started before, or certificates do not fit.
    """
    import jax

    connect_heartbeat()
    if cluster.coordinator is None or cluster.processes == 1:
        return
    tls = PeerTls.read(os.environ, supported=takes_certificates(metadata.version("jax")))
    meet(cluster, facts, timeout=timeout, tls=tls, token=os.environ.get(TOKEN, ""))
    if cluster.index:
        # A gRPC client that finds no listener retries only after a second.
        connect(cluster, timeout).close()
    address = CoordinatorAddress(bind_host(cluster.coordinator) or "::", cluster.coordinator.port)
    try:
        jax.distributed.initialize(
            str(cluster.coordinator),
            cluster.processes,
            cluster.index,
            local_device_ids=list(cluster.devices) or None,
            cluster_detection_method="deactivate",
            # The default listens on every interface.
            coordinator_bind_address=str(address),
            initialization_timeout=max(int(timeout), 60),  # all processes are present
            heartbeat_timeout_seconds=WATCHED_TIMEOUT if HEARTBEAT.watched else HEARTBEAT_TIMEOUT,
        )
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise ConfigError(
            f"{cluster.kind} has {cluster.processes} processes, and this one used JAX before they "
            f"met. Write jt.join_processes() as the first line after the imports: before anything "
            f"that asks for devices or makes arrays, such as an nnx module."
        ) from None
    fail_alone()
    if not HEARTBEAT.watched and not faulthandler.is_enabled():
        # JAX aborts this process because of another one: then it shows its stacks.
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # no stream
            faulthandler.enable()


def meet(
    cluster: Cluster, facts: Facts, *, timeout: float, tls: PeerTls | None = None, token: str = ""
) -> None:
    """Return in all processes once all have connected and have the same facts.

    A visitor that does not fit is told so and turned away; process 0 waits on, since anybody who
    reaches its port may claim to be one of the processes.

    Args:
        facts: values by name that must be equal in all processes.
        timeout: seconds.
        tls, token: certificate of this process, and secret of the run; only processes with a valid
            one and with the same one are let in.

    Raises:
        PeerError: if a process does not connect in time, with its number and who was turned away.
        ConfigError: in a process that does not fit: its number is taken, or its facts differ.
    """
    meet_others = _visit if cluster.index else _receive
    meet_others(cluster, facts, timeout, tls, token)


def bind_host(address: CoordinatorAddress) -> str:
    """Return the host at which process 0 listens: the loopback, or the address's interface.

    Empty (every interface) only if the name resolves to the loopback here, as on some machines.
    """
    if address.loopback:
        return "127.0.0.1" if address.host == "localhost" else address.host
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(address.host, None)[0][4][0])
        return "" if CoordinatorAddress(host, address.port).loopback else host
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


class _Greeting(NamedTuple):
    """What a connection said: an error if it has no valid certificate."""

    peer: socket.socket
    host: str
    content: Any


def _receive(
    cluster: Cluster, facts: Facts, timeout: float, tls: PeerTls | None, token: str
) -> None:
    visitors: dict[int, _Greeting] = {}
    refused: list[str] = []
    greetings: queue.SimpleQueue[_Greeting] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout
    files = _allow_open_files()
    with contextlib.ExitStack() as stack:
        with _listen(cluster) as listener:
            listener.settimeout(POLL)
            while len(visitors) < cluster.processes - 1 and time.monotonic() < deadline:
                try:
                    peer, (host, *_) = listener.accept()
                    stack.callback(_close, peer)
                    threading.Thread(
                        target=_read_greeting, args=(peer, host, tls, greetings.put), daemon=True
                    ).start()
                except OSError as error:  # none came, or no file is left for it
                    if error.errno == errno.EMFILE:
                        time.sleep(POLL)
                        why = f"some, at {files} open files: ulimit -n {2 * cluster.processes}"
                        refused += [why] * (why not in refused)
                while not greetings.empty():
                    greeting = greetings.get()
                    stack.callback(greeting.peer.close)
                    try:
                        index, error = _examine(cluster, greeting, facts, visitors, token)
                    except (ValueError, KeyError, TypeError, OverflowError):
                        greeting.peer.close()  # it is no process of jtrain
                        continue
                    if error is None:
                        visitors[index] = greeting
                        continue
                    _answer(greeting.peer, error)
                    greeting.peer.close()
                    why = escape_controls(str(error))  # what a stranger says reaches a terminal
                    if why not in refused and len(refused) < SHOWN:
                        refused.append(why)
                        _log.warning("turned away: %s", why)
        # The listener is closed here: whoever gets an answer finds JAX's listener or none.
        missing = _missing(cluster, visitors, timeout, refused)
        for visitor in visitors.values():
            _answer(visitor.peer, missing)
    if missing:
        raise missing


def _allow_open_files() -> int:
    """Raise the limit of open files, and return it: each process takes one, and one of JAX's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if not 0 <= soft < most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def _read_greeting(
    peer: socket.socket, host: str, tls: PeerTls | None, put: Callable[[_Greeting], None]
) -> None:
    """Read the greeting of a connection, in a thread: it holds up no other."""
    content: Any = None
    try:
        peer.settimeout(HELLO)
        peer = tls.wrap(peer) if tls else peer
        with peer.makefile("rb") as file:
            content = parse_json(file.readline(LONGEST))
    except ssl.SSLError as error:
        content = error
    except (OSError, ValueError, ConfigError):
        peer.close()
        return
    put(_Greeting(peer, host, content))


def _close(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it
    peer.close()


def _answer(peer: socket.socket, error: Exception | None) -> None:
    """Tell a visitor that all have come, or the error; it is small enough to be sent at once."""
    with contextlib.suppress(OSError):
        peer.settimeout(HELLO)
        kind = "" if error is None else type(error).__name__
        peer.sendall(json.dumps({"jtrain": kind, "error": str(error or "")}).encode() + b"\n")


def _examine(
    cluster: Cluster,
    greeting: _Greeting,
    facts: Facts,
    visitors: Mapping[int, _Greeting],
    token: str,
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
    """Return whether a visitor has ended: its launcher has started it again."""
    try:
        peer.settimeout(0)
        return not peer.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def _listen(cluster: Cluster) -> socket.socket:
    address = _address(cluster)
    host = bind_host(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, address.port), family=family, backlog=1024)
    except OSError as error:
        by = f"Give it an address of this machine and a free port by {_variables(cluster)}."
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            holder, stop = find_port_holder(address.port)
            why = f"{holder or 'another program'} listens at port {address.port}"
            other = CoordinatorAddress(address.host, free_port())
            by = f"Set JTRAIN_COORDINATOR={other} for all processes, or stop it"
            by += f": {stop}" if stop else "."
    raise ConfigError(f"process 0 cannot listen at {address} on this machine ({why}). {by}")


def _visit(cluster: Cluster, facts: Facts, timeout: float, tls: PeerTls | None, token: str) -> None:
    address, deadline = _address(cluster), time.monotonic() + timeout
    numbers = {"index": cluster.index, "processes": cluster.processes}
    hello = {**numbers, "facts": dict(facts), "token": token}
    answer, why = None, ""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(connect(cluster, timeout))
        try:
            peer.settimeout(HELLO)
            peer = stack.enter_context(tls.wrap(peer, host=address.host)) if tls else peer
            peer.sendall(json.dumps(hello).encode() + b"\n")
            peer.settimeout(max(deadline - time.monotonic(), 0) + HELLO)
            answer = parse_json(stack.enter_context(peer.makefile("rb")).readline(LONGEST))
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


def _missing(
    cluster: Cluster, visitors: Mapping[int, _Greeting], timeout: float, refused: list[str]
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


def _address(cluster: Cluster) -> CoordinatorAddress:
    assert cluster.coordinator is not None, "several processes have a coordinator"
    return cluster.coordinator


def _variables(cluster: Cluster) -> str:
    return ", ".join(cluster.by) or "JTRAIN_COORDINATOR"
