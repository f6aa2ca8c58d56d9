"""Placement: the resources of a process, and how many processes the nodes of a cluster hold."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jtrain.errors import UserError

Resources: TypeAlias = Mapping[str, float]
_KNOWN = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "memory": "memory"}


class Node(NamedTuple):
    """A node of a cluster, and its resources."""

    address: str
    resources: Resources


def parse_resources(text: str) -> dict[str, float]:
    """Parse `CPU=4,GPU=1`; empty: none.

    Raises:
        UserError: if a part is not a resource with a positive number.
    """
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or not 0 < amount < float("inf"):
            raise UserError(
                f"jtrain launch: --resources {text!r}: {part.strip()!r} is not a resource with a "
                f"number above 0; type --resources CPU=4,GPU=1"
            )
        right = _KNOWN.get(name.lower(), name)
        if name != right:
            raise UserError(
                f"jtrain launch: --resources {text!r}: Ray writes {name} as {right}; "
                f"type --resources {right}={number}"
            )
        found[name] = amount
    return found


def default_resources(nodes: Iterable[Node], *, on_cpu: bool) -> dict[str, float]:
    """Return the resources of a process: a CPU, and one GPU or all TPU chips of a host.

    libtpu gives the chips of a host to one process.

    Args:
        nodes: the nodes of the cluster.
        on_cpu: whether the processes train on CPUs, also where a node has accelerators.
    """
    if not on_cpu:
        nodes = list(nodes)
        if chips := [node.resources["TPU"] for node in nodes if node.resources.get("TPU")]:
            return {"CPU": 1.0, "TPU": min(chips)}
        if any(node.resources.get("GPU") for node in nodes):
            return {"CPU": 1.0, "GPU": 1.0}
    return {"CPU": 1.0}


def room(nodes: Iterable[Node], needed: Resources) -> int:
    """Return how many processes fit on the nodes, each within one node."""
    return sum(
        min(int(node.resources.get(name, 0.0) / amount + 1e-6) for name, amount in needed.items())
        for node in nodes
    )


def format_resources(resources: Resources) -> str:
    """Return `CPU=4,GPU=1`."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())


def describe_nodes(nodes: Sequence[Node], needed: Resources) -> str:
    """Return the nodes with what they have of the needed resources."""
    if not nodes:
        return "no node"
    shown = [
        f"{node.address} with "
        + format_resources({name: node.resources.get(name, 0.0) for name in needed})
        for node in nodes[:8]
    ]
    return "; ".join(shown) + ("; ..." if len(nodes) > 8 else "")


class Host(NamedTuple):
    """The place of an actor: its node, and the order of the node in a TPU slice."""

    node: str
    address: str
    slice: str
    worker: int


def order(hosts: Sequence[Host]) -> list[int]:
    """Return the actors in the order of their processes.

    The processes of a node are neighbours, so that the inner axes of a mesh stay in a node; the
    hosts of a TPU slice keep the slice's own order. Otherwise the order is that of the actors.
    """
    first = {host.node: index for index, host in reversed(list(enumerate(hosts)))}
    key = lambda index: (hosts[index].slice, hosts[index].worker, first[hosts[index].node], index)
    return sorted(range(len(hosts)), key=key)
