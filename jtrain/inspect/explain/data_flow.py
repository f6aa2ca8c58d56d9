"""The flow of data between modules: which arrays each gets from which others, and what it saves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jtrain.inspect.explain.operations import Operation, format_aval, num_bytes
from jtrain.inspect.explain.residuals import Residual
from jtrain.inspect.explain.scopes import PHASES, Phase, grouped_path, is_function

_SMALL = 0.02  # of the largest array: smaller ones are not drawn


@dataclasses.dataclass
class FlowNode:
    """A module, or the operations of a module beside those of the modules inside it."""

    name: str
    layers: int = 1
    flops: dict[Phase, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )
    saved: int = 0
    operations: int = 0


@dataclasses.dataclass(frozen=True)
class FlowEdge:
    """The largest array that one node computes and another reads, in the forward pass."""

    source: str
    target: str
    array: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Flow:
    """Nodes in the order of the forward pass, and the arrays between them."""

    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...]

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "edges": [dataclasses.asdict(edge) for edge in self.edges],
        }


def trace_flow(operations: Sequence[Operation], residuals: Sequence[Residual]) -> Flow:
    """Return the flow between the modules of a loss.

    Nodes without products, parameters of a size and saved arrays are passed through: an array that
    they hand on comes from the node before them.
    """
    nodes: dict[str, FlowNode] = {}
    layers: dict[str, set[tuple[str, ...]]] = {}
    first: dict[str, int] = {}  # the place of a module, and of the first product of a function
    for place, operation in enumerate(operations):
        name = _name(operation.path)
        if operation.flops or not is_function(name):
            first.setdefault(name, place)
        node = nodes.setdefault(name, FlowNode(name))
        node.flops[operation.phase] += operation.flops or 0.0
        node.operations += 1
        layers.setdefault(name, set()).add(operation.path)
        if operation.phase == "forward" and len(layers[name]) == 1:
            node.layers = max(node.layers, operation.times if operation.counted else 1)
    for residual in residuals:
        if residual.kind == "computed":
            name = _name(residual.path)
            nodes.setdefault(name, FlowNode(name)).saved += residual.bytes
            first.setdefault(name, len(operations))
    for name, paths in layers.items():
        nodes[name].layers = max(nodes[name].layers, len(paths))
    shown = {name for name, node in nodes.items() if _is_shown(node)}
    edges = _edges(operations, shown)
    used = sorted((nodes[name] for name in shown), key=lambda node: first[node.name])
    return Flow(tuple(used), tuple(edges))


def _is_shown(node: FlowNode) -> bool:
    module = not is_function(node.name)
    return any(node.flops.values()) or (module and node.operations > 0)


def _edges(operations: Sequence[Operation], shown: set[str]) -> list[FlowEdge]:
    """Return the largest array between each two nodes, of the forward pass."""
    origins: list[frozenset[str]] = []  # the shown nodes that each operation's results come from
    largest: dict[tuple[str, str], tuple[int, str]] = {}
    for operation in operations:
        name, before = _name(operation.path), set()
        for value in operation.inputs:
            sources = origins[value.producer] if value.producer >= 0 else frozenset()
            before |= sources
            for source in sources:
                if name in shown and source != name and operation.phase == "forward":
                    size = num_bytes(value.aval)
                    found = largest.get((source, name), (-1, ""))
                    largest[source, name] = max(found, (size, format_aval(value.aval)))
        origins.append(frozenset({name}) if name in shown else frozenset(before))
    top = max((size for size, _ in largest.values()), default=0)
    return [
        FlowEdge(source, target, array, size)
        for (source, target), (size, array) in largest.items()
        if size >= _SMALL * top
    ]


def _name(path: tuple[str, ...]) -> str:
    return "/".join(grouped_path(path))
