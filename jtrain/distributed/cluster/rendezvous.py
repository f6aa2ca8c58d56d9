"""Brings the processes of a run together before JAX does, and compares what they were started with.

JAX ends a process from C++ when a peer does not come, without a word of which; so they meet here
first. Process 0 listens at the coordinator's address, the others come and say who they are and what
they have, and all get the same answer. Then the port is JAX's.
"""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.errors import ConfigError, PeerError
from jtrain.io.regular_files import parse_json

Facts: TypeAlias = Mapping[str, str]
HELLO, MOST = 5.0, 1 << 24  # seconds and bytes that one greeting may take
SHOWN = 12  # facts that differ


@dataclasses.dataclass(frozen=True)
class _Came:
    """One that came, and what it said."""

    peer: socket.socket
    host: str
    index: int
    processes: int
    facts: Facts


def meet(cluster: Cluster, facts: Facts, *, timeout: float) -> None:
    """Returns in all processes once all are there and have the same facts.

    Args:
        facts: by name, what has to be the same in all.
        timeout: seconds.

    Raises:
        PeerError: for a process that did not come in time, by its number.
        ConfigError: if two have one number, or facts differ, with what each has.
    """
    if cluster.index:
        _visit(cluster, facts, timeout)
    else:
        _receive(cluster, facts, timeout)


def bound(address: CoordinatorAddress) -> str:
    """Where process 0 listens: on the loopback, or on the interface that the address names.

    On every interface only if its name means the loopback here, as it does on some machines.
    """
    if address.loopback:
        return "127.0.0.1" if address.host == "localhost" else address.host
    with contextlib.suppress(OSError):
        found = CoordinatorAddress(
            str(socket.getaddrinfo(address.host, None)[0][4][0]), address.port
        )
        return "" if found.loopback else found.host
    return ""


def reached(cluster: Cluster, timeout: float) -> socket.socket:
    """A connection to process 0, once it listens.

    Raises:
        PeerError: if it does not within so many seconds.
    """
    address, deadline = _address(cluster), time.monotonic() + timeout
    longest = 0.05 if address.loopback else 0.5  # between two tries; a thousand machines may try
    pause, why = 0.01, "nobody listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection(address, timeout=min(left, HELLO))
        except socket.gaierror:
            why = f"no machine is called {address.host}"
        except OSError as error:
            why = error.strerror or "no answer"
        time.sleep(min(pause, max(left, 0)))
        pause = min(2 * pause, longest)
    raise PeerError(
        f"process {cluster.index} of {cluster.processes} looked {timeout:g} s for process 0 at "
        f"{address} and did not find it ({why}). Start process 0 there, or name its machine by "
        f"{_variables(cluster)}; parallel.start_timeout waits longer."
    )


def _receive(cluster: Cluster, facts: Facts, timeout: float) -> None:
    came: dict[int, _Came] = {}
    error: ConfigError | PeerError | None = None
    with contextlib.ExitStack() as stack:
        with contextlib.closing(_comers(stack, cluster, timeout)) as comers:
            for one in comers:
                error = _out_of_place(cluster, one, came)
                came[one.index if error is None else -1] = one
                if error or len(came) == cluster.processes - 1:
                    break
        # Nobody listens from here on, so that who is answered finds JAX's listener or none.
        error = error or _missing(cluster, came, timeout) or _differing(facts, came)
        kind = "" if error is None else type(error).__name__
        for one in came.values():
            with contextlib.suppress(OSError):
                _say(one.peer, {"jtrain": kind, "error": str(error or "")})
    if error:
        raise error


def _comers(
    stack: contextlib.ExitStack, cluster: Cluster, timeout: float
) -> Generator[_Came, None, None]:
    """Those that come in time; strangers are let go."""
    deadline = time.monotonic() + timeout
    with _listener(cluster) as listener:
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                peer, (host, *_) = listener.accept()
            except TimeoutError:
                return
            stack.enter_context(peer)
            peer.settimeout(HELLO)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                said = _heard(peer)
                yield _Came(peer, host, int(said["index"]), int(said["processes"]), said["facts"])


def _listener(cluster: Cluster) -> socket.socket:
    address = _address(cluster)
    host = bound(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"process 0 was to be reached at {address}, and cannot listen there on this machine "
            f"({error.strerror}). Give it an address and a free port of its own by "
            f"{_variables(cluster)}."
        ) from None


def _visit(cluster: Cluster, facts: Facts, timeout: float) -> None:
    address, deadline = _address(cluster), time.monotonic() + timeout
    with reached(cluster, timeout) as peer:
        answer: Any = None
        with contextlib.suppress(OSError, ValueError):
            peer.settimeout(HELLO)
            _say(
                peer,
                {"index": cluster.index, "processes": cluster.processes, "facts": dict(facts)},
            )
            peer.settimeout(max(deadline - time.monotonic(), 0) + HELLO)
            answer = _heard(peer)
    if not isinstance(answer, dict) or "jtrain" not in answer:
        raise PeerError(
            f"process {cluster.index} of {cluster.processes} came to {address} and got no answer "
            f"that it knows: process 0 ended, or another program has that port. Read what process "
            f"0 said; set {_variables(cluster)} to a free port."
        )
    if answer["jtrain"]:
        raise {"ConfigError": ConfigError}.get(answer["jtrain"], PeerError)(answer["error"])


def _out_of_place(
    cluster: Cluster, one: _Came, came: Mapping[int, _Came]
) -> ConfigError | PeerError | None:
    """What is wrong with who came."""
    if one.processes != cluster.processes:
        return ConfigError(
            f"process 0 was started as one of {cluster.processes}, and process {one.index} (from "
            f"{one.host}) as one of {one.processes}. Set the same number for all: "
            f"{_variables(cluster)}."
        )
    if one.index in came or not 0 < one.index < cluster.processes:
        other = came[one.index].host if one.index in came else "here"
        return ConfigError(
            f"two processes say that they are process {one.index} of {cluster.processes}: one from "
            f"{one.host}, one from {other}. Give each a number of its own: {_variables(cluster)}."
        )
    return None


def _missing(cluster: Cluster, came: Mapping[int, _Came], timeout: float) -> PeerError | None:
    missing = [i for i in range(1, cluster.processes) if i not in came]
    if not missing:
        return None
    named = ", ".join(map(str, missing[:SHOWN])) + ", ..." * (len(missing) > SHOWN)
    return PeerError(
        f"{len(came) + 1} of {cluster.processes} processes came to {cluster.coordinator} within "
        f"{timeout:g} s; process {named} did not. Start {'it' if len(missing) == 1 else 'them'} "
        f"with the same {_variables(cluster)} and its own number, or set "
        f"parallel.start_timeout={2 * timeout:g} to wait longer."
    )


def _differing(facts: Facts, came: Mapping[int, _Came]) -> ConfigError | None:
    """What the first process that differs has otherwise."""
    for index, one in sorted(came.items()):
        names = [name for name in {**facts, **one.facts} if facts.get(name) != one.facts.get(name)]
        if names:
            rows = [
                f"  {name}: {facts.get(name, 'none')} in process 0, "
                f"{one.facts.get(name, 'none')} in process {index}"
                for name in names[:SHOWN]
            ]
            rows += [f"  and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
            return ConfigError(
                f"process {index} (from {one.host}) is not what process 0 is:\n"
                + "\n".join(rows)
                + "\nStart all of them by the same command, from the same files and packages."
            )
    return None


def _address(cluster: Cluster) -> CoordinatorAddress:
    assert cluster.coordinator is not None, "several processes have one"
    return cluster.coordinator


def _variables(cluster: Cluster) -> str:
    return ", ".join(cluster.by) or "JTRAIN_COORDINATOR"


def _say(peer: socket.socket, said: Mapping[str, Any]) -> None:
    peer.sendall(json.dumps(said).encode() + b"\n")


def _heard(peer: socket.socket) -> Any:
    with peer.makefile("rb") as stream:
        return parse_json(stream.readline(MOST))
