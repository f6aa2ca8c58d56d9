"""Ray clusters: the connection to one, or a private one on this machine."""

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.distributed.launcher.ray.guard import guarded
from jtrain.distributed.launcher.ray.placement import Node, Resources, format_resources
from jtrain.errors import PeerError, UserError

LOCAL = "local"
STORE = 100_000_000  # bytes of the object store of a private cluster, which holds nothing of ours
_PREFIX = "jtrain-ray-"
_LONGEST = 40  # letters of the folder: Ray adds 63 for its sockets, and Linux allows 107
_ADDRESS = re.compile(r"[^\s/]+:\d+")


def check_installed() -> None:
    """Raise UserError, with the command that installs Ray, if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "jtrain launch: --engine ray needs Ray, which is not installed. Type: "
            "pip install 'jtrain[ray]', or leave --engine out to run on this machine"
        )


def import_ray() -> Any:
    """Import and return Ray; within `connected`, since Ray reads its variables at the import."""
    return importlib.import_module("ray")


def parse_address(typed: str, variable: str) -> str:
    """Return the address of the cluster to use; `local` for a private one.

    Args:
        typed: what was typed after --address; empty: nothing.
        variable: the value of RAY_ADDRESS; empty: none.

    Raises:
        UserError: if it is no address.
    """
    address, name = (typed, "--address") if typed else (variable, "RAY_ADDRESS=")
    if not address or address in {LOCAL, "auto"}:
        return address or LOCAL
    if _ADDRESS.fullmatch(address):
        return address
    why = "is not an address of a Ray cluster"
    if address.startswith("ray://"):
        why = "is for Ray Client, which the launcher does not use: a driver on the cluster does"
    raise UserError(
        f"jtrain launch: {name} {address!r} {why}. Type --address HOST:6379 (the head node's "
        f"address, as `ray start --head` prints it), --address auto for the cluster of this "
        f"machine, or --address local for a private one"
    )


@contextlib.contextmanager
def connected(address: str, cpus: float) -> Iterator[None]:
    """Connect to the cluster at an address, or start a private one, for a `with` block.

    A private cluster ends with the block, and with this process however it ends; it leaves no file
    behind.

    Args:
        cpus: the CPUs of a private cluster. They are numbers for placement, not cores.

    Raises:
        UserError: if no cluster answers, or it has another version of Ray or Python.
        PeerError: if a private one does not start.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        if address == LOCAL:
            _start_private(stack, cpus)
        else:
            if address != "auto":
                _check_listens(address)
            _connect(address)
        stack.callback(import_ray().shutdown)
        yield


def _start_private(stack: contextlib.ExitStack, cpus: float) -> None:
    """Start a private cluster, which ends with the stack.

    Ray gives a node 30 s to start, too few on a busy machine; so it is tried again.
    """
    token = secrets.token_hex(32)  # one for all attempts: Ray keeps the first that it reads
    for last in (False, False, True):
        with contextlib.ExitStack() as own:
            folder = own.enter_context(_private_folder(token))
            try:
                _connect(
                    LOCAL,
                    num_cpus=int(cpus),
                    object_store_memory=STORE,
                    include_dashboard=False,
                    _temp_dir=folder,
                )
            except PeerError:
                if last:
                    raise
                continue
            stack.enter_context(own.pop_all())
            return


def _connect(address: str, **options: Any) -> None:
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except Exception as error:  # Ray raises Exception itself where a node does not start
        ray.shutdown()
        raise connection_error(address, f"{error}") from None


def connection_error(address: str, text: str) -> UserError | PeerError:
    """Return the error for a message of Ray's about a connection."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "ersion mismatch" in text and len(versions) >= 2:
        (ray, python), (own_ray, own_python) = versions[:2]
        return UserError(
            f"jtrain launch: the Ray cluster at {address} has Ray {ray} and Python {python}, and "
            f"this environment has Ray {own_ray} and Python {own_python}. Type: pip install "
            f"'ray=={ray}', in an environment of Python {python}"
        )
    if "InvalidAuthToken" in text or "uthentication" in text:
        return UserError(
            f"jtrain launch: the Ray cluster at {address} wants its token. Copy "
            f"~/.ray/auth_token of its head node to this machine, or set RAY_AUTH_TOKEN"
        )
    if address == LOCAL:
        return PeerError(
            f"jtrain launch: Ray did not start on this machine: {first_sentence(text)}. Type the "
            f"same command again, when the machine is less busy; if that fails too, ray start "
            f"--head prints the reason"
        )
    return _nobody(address, first_sentence(text))


def cluster_nodes(*, available: bool = False) -> list[Node]:
    """Return the nodes that are alive, with all their resources or those that are free."""
    ray, state = import_ray(), importlib.import_module("ray._private.state")
    free = state.available_resources_per_node() if available else {}
    return [
        Node(
            node["NodeManagerAddress"],
            free.get(node["NodeID"], {}) if available else node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def describe_cluster(address: str, needed: Resources) -> str:
    """Return a line about the cluster and the resources of a process."""
    nodes = cluster_nodes()
    where = "a private Ray cluster" if address == LOCAL else f"the Ray cluster at {address}"
    plural = "node" if len(nodes) == 1 else "nodes"
    return f"{where} ({len(nodes)} {plural}), {format_resources(needed)} for each process"


def first_sentence(text: str) -> str:
    """Return the first line of a message, without its full stop."""
    return next(iter(text.strip().splitlines()), "no message").strip().rstrip(".")


def _check_listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise _nobody(address, getattr(error, "strerror", "") or f"{error}") from None


def _nobody(address: str, why: str) -> UserError:
    where = "on this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"jtrain launch: no Ray cluster answers {where} ({why}). Start one by ray start --head "
        f"--port=6379, type the address that it prints, or --address local for a private one"
    )


@contextlib.contextmanager
def _private_folder(content: str) -> Iterator[str]:
    """Make a folder for a private cluster, with its token; the guard removes it."""
    parent = Path(tempfile.gettempdir())
    parent = parent if len(str(parent)) + len(_PREFIX) + 8 <= _LONGEST else Path("/tmp")
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    # Ray's own default is ~/.ray/auth_token, which would stay.
    own = {
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
        "RAY_AUTH_TOKEN_PATH": f"{folder}/token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves a rehearsal on a busy machine
    }
    before = {name: os.environ.pop(name, None) for name in (*own, "RAY_ADDRESS")}
    try:
        with guarded(folder):
            token = Path(folder, "token")
            token.touch(mode=0o600)
            token.write_text(content)
            os.environ.update(own)
            yield folder
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
