"""Costs of a step by module."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jtrain.errors import ConfigError
from jtrain.errors.spelling import nearest_choice
from jtrain.inspect.explain.operations import (
    PHASES,
    Operation,
    Phase,
    grouped_path,
    is_function,
)
from jtrain.inspect.explain.residuals import Residual


@dataclasses.dataclass
class ModuleCost:
    """Costs of a module and all modules inside it; layers of one kind share an entry."""

    path: tuple[str, ...]
    """Names from the outermost module in; `*` for the numbers of layers. Empty: the whole loss."""
    layers: int = 1
    """Modules that share the entry, or turns of the loop that the module is in."""
    flops: dict[Phase, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )
    bytes: int = 0
    """Bytes that its operations read and write if the compiler fuses none of them."""
    operations: int = 0
    """Operations in the program."""
    parameters: int = 0
    saved: int = 0
    """Bytes that its forward pass saves for the backward pass, beside arguments."""
    children: dict[str, "ModuleCost"] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Path as text."""
        return "/".join(self.path) or "loss"

    @property
    def total(self) -> float:
        """FLOPs of the forward and the backward pass, with what is recomputed."""
        return sum(self.flops.values())

    def walk(self) -> Iterator["ModuleCost"]:
        """Yield the module and all inside it, in the order in which they are computed."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "module": self.name,
            "layers": self.layers,
            "flops": {**self.flops, "total": self.total},
            "bytes": self.bytes,
            "operations": self.operations,
            "parameters": self.parameters,
            "saved_bytes": self.saved,
            "modules": [child.plain() for child in self.children.values()],
        }


def sum_by_module(
    operations: Sequence[Operation],
    residuals: Sequence[Residual],
    parameters: Mapping[str, int],
) -> ModuleCost:
    """Return the costs of all modules as a tree, whose root is the whole loss.

    Args:
        operations: of the gradient of the loss.
        parameters: number of parameters of each leaf, by its name `blocks/0/qkv/kernel`.
    """
    root = ModuleCost(())
    for operation in operations:
        for node in _nodes(root, operation.path):
            node.flops[operation.phase] += operation.flops or 0.0
            node.bytes += operation.bytes
            node.operations += 1
    for residual in residuals:
        if residual.kind == "computed":
            for node in _nodes(root, residual.path):
                node.saved += residual.bytes
    for leaf, count in parameters.items():
        for node in _nodes(root, tuple(leaf.split("/")), make=False):
            node.parameters += count
    _count_layers(root, operations)
    return root


def _count_layers(root: ModuleCost, operations: Sequence[Operation]) -> None:
    """Set how many modules share each entry, or how many turns of a loop the entry is in."""
    concrete: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    turns: dict[tuple[str, ...], int] = {}
    for operation in operations:
        for depth in range(1, len(operation.path) + 1):
            path = operation.path[:depth]
            concrete.setdefault(grouped_path(path), set()).add(path)
            if operation.phase == "forward":
                least = turns.get(grouped_path(path), operation.times)
                turns[grouped_path(path)] = min(least, operation.times)
    for node in root.walk():
        inner_function = len(node.path) > 1 and is_function(node.path[-1])
        if node.path and not inner_function:
            several = len(concrete.get(node.path, ()))
            node.layers = several if several > 1 else turns.get(node.path, 1)


def select_modules(root: ModuleCost, name: str) -> ModuleCost:
    """Return the module of a name such as `blocks/3/qkv`, `blocks/qkv` or `qkv`.

    Raises:
        ConfigError: if there is none, with the nearest names; or if there are several.
    """
    wanted = "/".join(grouped_path(tuple(name.strip("/").split("/"))))
    nodes = {node.name: node for node in root.walk() if node.path}
    if wanted in nodes:
        return nodes[wanted]
    plain = lambda name: "/".join(part for part in name.split("/") if part != "*")
    ends = [known for known in nodes if f"/{plain(known)}".endswith(f"/{plain(wanted)}")]
    if len(ends) == 1:
        return nodes[ends[0]]
    if ends:
        raise ConfigError(
            f"--module {name} is the end of {len(ends)} names; write one of: {', '.join(ends)}"
        )
    by_end = {known.rpartition("/")[2]: known for known in reversed(nodes)}
    near = nearest_choice(wanted, nodes) or by_end.get(nearest_choice(wanted, by_end), "")
    meant = f" Did you mean --module '{near}'?" if near else ""
    raise ConfigError(
        f"--module {name}: the loss has no such module.{meant} Its modules: {', '.join(nodes)}"
    )


def fold_small(root: ModuleCost, least: float = 0.005, whole: int | None = None) -> ModuleCost:
    """Return the tree with the functions of small share in one entry, `(other)`.

    Modules stay, and so do functions with FLOPs.

    Args:
        least: share of the saved bytes of the `whole` below which a function is small.
    """
    whole = root.saved if whole is None else whole
    children, small = {}, ModuleCost((*root.path, "(other)"))
    for name, child in root.children.items():
        works = child.total or child.parameters or child.saved > least * whole
        if works or not is_function(name):
            children[name] = fold_small(child, least, whole)
            continue
        small.bytes += child.bytes
        small.saved += child.saved
        small.operations += child.operations
    if small.operations:
        children["(other)"] = small
    return dataclasses.replace(root, children=children)


def share(part: float, total: float) -> float:
    """Return a share of 0 to 1; 0 where there is nothing."""
    return part / total if total and math.isfinite(total) else 0.0


def _nodes(root: ModuleCost, path: tuple[str, ...], *, make: bool = True) -> list[ModuleCost]:
    """Return the entries of a path, the root first; missing ones are made, or end the list."""
    nodes, grouped = [root], grouped_path(path)
    for depth, part in enumerate(grouped, 1):
        if part not in nodes[-1].children and not make:
            break
        nodes.append(nodes[-1].children.setdefault(part, ModuleCost(grouped[:depth])))
    return nodes
