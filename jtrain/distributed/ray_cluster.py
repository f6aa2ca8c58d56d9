"""Ray: the connection to a cluster, and what a process on it gets."""

import contextlib
import importlib
import importlib.util
import math
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from jtrain.errors import PeerError, UserError

LOCAL = "local"
STORE = 100_000_000  # bytes of the object store of a private cluster, which holds nothing of ours
_ADDRESS = re.compile(r"[^\s/]+:\d+")
_KNOWN = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "memory": "memory"}
# Variables of the driver that its processes get, by the beginnings of their names: those that
# change the numbers or the devices, and the keys of trackers and stores. The others are those of
# the node.
FORWARDED = (
    *("JAX_", "XLA_", "JTRAIN_", "LIBTPU_", "NCCL_", "PYTHON", "TF_CPP_"),
    *("WANDB_", "MLFLOW_", "HF_", "AWS_", "GOOGLE_", "GCS_"),
)


def check_installed(name: str, other: str) -> None:
    """Raise UserError, with the command that installs Ray, if it is not installed.

    Args:
        name: what needs Ray.
        other: what to type to do without it.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"{name} needs Ray, which is not installed. Type: pip install 'jtrain[ray]', or {other}"
        )


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
    raise UserError(
        f"{name} {address!r} is not an address of a Ray cluster. Type --address HOST:6379 (the "
        f"head node's address, as `ray start --head` prints it), --address auto for the cluster of "
        f"this machine, or --address local for a private one"
    )


@contextlib.contextmanager
def connected(address: str, cpus: float, *, output: bool = False) -> Iterator[Any]:
    """Connect to the cluster at an address, or start a private one; yield the module `ray`.

    A private cluster ends with the `with` block, and with this process however it ends.

    Args:
        cpus: the CPUs of a private cluster. They are numbers for placement, not cores.

    Raises:
        UserError: if no cluster answers, or it has another version of Ray or Python.
        PeerError: if a private one does not start.
    """
    options: dict[str, Any] = {}
    if address == LOCAL:
        # Ray reads them when it is imported. Without a token any user of the machine could run
        # code in the cluster.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {
            "num_cpus": math.ceil(cpus),
            "object_store_memory": STORE,
            "include_dashboard": False,
        }
    elif address != "auto":
        _check_listens(address)
    ray = importlib.import_module("ray")
    try:
        ray.init(address=address, log_to_driver=output, logging_level="ERROR", **options)
    except Exception as error:  # Ray raises Exception itself where a node does not start
        ray.shutdown()
        raise connection_error(address, f"{error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def connection_error(address: str, text: str) -> UserError | PeerError:
    """Return the error for a message of Ray's about a connection."""
    if address == LOCAL:
        return PeerError(
            f"Ray did not start on this machine: {first_line(text)}. Type the same command again, "
            f"when the machine is less busy; if that fails too, ray start --head prints the reason"
        )
    return _no_cluster(address, " ".join(text.split())[:300])


def first_line(text: str) -> str:
    """Return the first line of a message, without its full stop."""
    return next(iter(text.strip().splitlines()), "no message").strip().rstrip(".")


def parse_resources(text: str) -> dict[str, float]:
    """Parse `CPU=4,GPU=1`; empty: none. Whole numbers are integers, as Ray wants them.

    Raises:
        UserError: if a part is not a resource with a positive number.
    """
    found: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = part.partition("=")
        amount = float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else 0.0
        if not name or not amount:
            raise UserError(
                f"resources {text!r}: {part!r} is not a resource with a number above 0; type "
                f"CPU=4,GPU=1"
            )
        right = _KNOWN.get(name.lower(), name)
        if name != right:
            raise UserError(
                f"resources {text!r}: Ray writes {name} as {right}; type {right}={number}"
            )
        found[name] = int(amount) if amount.is_integer() else amount
    return found


def process_resources(ray: Any, typed: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a process: what was typed, or a CPU and a GPU if there are any.

    JAX_PLATFORMS=cpu keeps it from the GPUs.
    """
    if typed:
        return {"CPU": 1, **typed}
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    return {"CPU": 1, **({"GPU": 1} if not on_cpu and ray.cluster_resources().get("GPU") else {})}


def forwarded(environ: Mapping[str, str], names: str = "") -> dict[str, str]:
    """Return the variables of the driver that its processes get.

    Args:
        names: names beside those of `FORWARDED`, separated by commas.

    Raises:
        UserError: if a named variable is not set.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if missing := [name for name in chosen if name not in environ]:
        raise UserError(
            f"jtrain launch: --env names {missing[0]}, which is not set here. Type "
            f"export {missing[0]}=VALUE first, or leave it out"
        )
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED) or name in chosen
    }


def _check_listens(address: str) -> None:
    """Raise at once if nobody listens: Ray would wait for half a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, getattr(error, "strerror", "") or f"{error}") from None


def _no_cluster(address: str, why: str) -> UserError:
    where = "on this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"no Ray cluster can be used {where} ({why}). Start one by ray start --head --port=6379, "
        f"type the address that it prints, or --address local for a private one"
    )
