"""The explanation of a config: its loss by module, what is saved, what the compiler makes of it."""

import dataclasses
import math
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from jtrain.core.pytree import named_leaves
from jtrain.inspect.explain.modules import ModuleCost, fold_small, share, sum_by_module
from jtrain.inspect.explain.operations import (
    Operation,
    grouped_path,
    list_operations,
    outer_paths,
    parse_scope,
    split_own_work,
)
from jtrain.inspect.explain.residuals import (
    Residual,
    group_residuals,
    list_residuals,
    trace_loss,
)
from jtrain.inspect.plan.collectives import (
    NOT_UNDERSTOOD,
    CollectiveRow,
    collective_table,
    collectives_of,
    reason,
)
from jtrain.inspect.plan.compile import CompiledStep, load_or_compile_step
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.schedule import mark_overlapped
from jtrain.inspect.plan.topology import Topology
from jtrain.inspect.sharding_table import describe_sharding
from jtrain.io.formatting import align_columns, format_bytes, format_count, format_seconds
from jtrain.train.program import Program
from jtrain.train.summary import StepFlops, count_step_flops


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of a step."""

    platform: str
    memory: Mapping[str, int]
    """Bytes on a device: arguments, temporaries, output, aliased."""
    seconds: float
    """Seconds of lowering and compiling."""
    collectives: tuple[CollectiveRow, ...] = ()
    unread: tuple[str, ...] = ()
    """Parts of the program that could not be read."""

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "platform": self.platform,
            "collectives": [each._asdict() for each in self.collectives],
            "memory": dict(self.memory),
            "seconds": round(self.seconds, 1),
            "unread": list(self.unread),
        }


def read_compiled(
    step: CompiledStep, mesh: Mapping[str, int], *, seconds: float, platform: str
) -> CompiledProgram:
    """Read a compiled step; a program in an unknown format gives a note in `unread`."""
    memory = {name: size for name, size in step.memory.items() if name != "host"}
    unread = (step.too_large.partition("\n")[0],) if step.too_large else ()
    found = CompiledProgram(platform, memory, seconds, unread=unread)
    try:
        program = HloProgram(step.text)
        traffic = collectives_of(program, mesh)
        collectives = mark_overlapped(traffic.collectives, program, mesh)
    except NOT_UNDERSTOOD as error:
        return dataclasses.replace(found, unread=(*unread, reason(error)))
    rows, unread = collective_table(collectives, _module), (*unread, *traffic.unread)
    return dataclasses.replace(found, collectives=tuple(rows), unread=unread)


def operation_modules(text: str) -> dict[str, str]:
    """Return the module of each instruction of a compiled program that has one, by its name."""
    try:
        computations = HloProgram(text).computations.values()
    except NOT_UNDERSTOOD:
        return {}
    modules = {
        each.name: _module(each.quoted("op_name")) for c in computations for each in c.values()
    }
    return {name: module for name, module in modules.items() if module != "-"}


def _module(name: str) -> str:
    """Return the module and the pass of an operation's name.

    A merged operation has the names of its parts: `jit(step)/(a/reduce_sum:b/dot_general)`.
    """
    # The last part of a name is the operation itself.
    head, _, parts = name.partition("/(")
    names = [f"{head}/{part}" for part in parts.removesuffix(")").split(":")]
    scopes = [parse_scope(each.rpartition("/")[0]) for each in (names if ":" in parts else [name])]
    paths = dict.fromkeys("/".join(grouped_path(scope.path)) for scope in scopes)
    modules = [path for path in paths if path] or ["-"]
    more = f" + {len(modules) - 1} more" if len(modules) > 1 else ""
    phase = next((scope.phase for scope in scopes if scope.phase not in (None, "forward")), "")
    return f"{modules[-1]}{more}{f' ({phase})' if phase else ''}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A step of a config explained; nothing was allocated for it."""

    name: str
    rows: int
    """Rows of a batch, over all devices; FLOPs and bytes of modules are of these."""
    microbatch: int
    """Rows of a microbatch, over all devices; what is saved is of these."""
    row_shards: int
    """Devices that the rows are split over."""
    modules: ModuleCost
    residuals: tuple[Residual, ...]
    flops: StepFlops
    layout: str
    """The layout as text: the kind, the axes and their sizes."""
    seconds: float
    """Seconds of setting up and tracing."""
    compiled: CompiledProgram | None
    notes: tuple[str, ...]
    """Parts whose cost is unknown."""

    @property
    def recomputed(self) -> float:
        """FLOPs that rematerialization computes again."""
        return self.modules.flops["recomputed"]

    @property
    def saved(self) -> int:
        """Bytes that the forward pass of a microbatch saves, beside arguments."""
        return sum(x.bytes for x in self.residuals if x.kind == "computed")

    def plain(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {
            "config": self.name,
            "rows": self.rows,
            "microbatch": self.microbatch,
            "row_shards": self.row_shards,
            "flops": {
                "model": self.flops.model,
                "hardware": self.flops.hardware,
                "recomputed": self.recomputed,
            },
            "saved_bytes": self.saved,
            "modules": self.modules.plain(),
            "residuals": [group.plain() for group in group_residuals(self.residuals)],
            "layout": self.layout,
            "compiled": self.compiled.plain() if self.compiled else None,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
        }


def explain(
    program: Program,
    *,
    compiles: bool = True,
    start: float | None = None,
    topology: Topology | None = None,
) -> tuple[Explanation, str, str]:
    """Return the explanation of a setup's step, the jaxpr of its loss and gradient, and its HLO.

    Args:
        start: the time.perf_counter() from which the seconds count; None: now.
        topology: of the setup's devices if they are absent; `jtrain plan` has the same cache.

    Raises:
        LossError: if the loss has no gradient, or breaks its contract.
        DataError: if the first batch cannot be read.
    """
    start = time.perf_counter() if start is None else start
    traced = trace_loss(program)
    operations = list_operations(traced.gradient)
    outer = outer_paths(operations)
    operations = [op._replace(path=split_own_work(op.path, op.source, outer)) for op in operations]
    residuals = [
        dataclasses.replace(x, path=split_own_work(x.path, x.source, outer))
        for x in list_residuals(traced.forward, traced.arguments)
    ]
    leaves = named_leaves(program.resolved.abstract_state.params)
    sizes = {name: math.prod(leaf.shape) for name, leaf in leaves.items()}
    modules = sum_by_module(operations, residuals, sizes)
    flops = count_step_flops(program)
    seconds = time.perf_counter() - start
    compiled, hlo = None, ""
    if compiles:
        begin = time.perf_counter()
        step = load_or_compile_step(program, topology)
        mesh, platform = program.resolved.strategy.axes, program.resolved.devices[0].platform
        took = time.perf_counter() - begin
        compiled = read_compiled(step, mesh or {"data": 1}, seconds=took, platform=platform)
        hlo = step.text
    found = Explanation(
        name=program.resolved.config.name,
        rows=program.resolved.config.batch,
        microbatch=traced.rows,
        row_shards=program.resolved.strategy.shares,
        modules=modules,
        residuals=tuple(residuals),
        flops=flops,
        layout=describe_sharding(program).line,
        seconds=seconds,
        compiled=compiled,
        notes=tuple(_notes(operations)),
    )
    return found, f"# loss\n{traced.loss}\n\n# gradient\n{traced.gradient}", hlo


def _notes(operations: Sequence[Operation]) -> list[str]:
    """Return a line for each part whose FLOPs are unknown."""
    notes: dict[str, None] = {}
    for operation in operations:
        where = f" ({operation.source})" if operation.source else ""
        if operation.flops is None:
            notes[f"the FLOPs of the kernel {operation.primitive} are unknown{where}"] = None
        elif not operation.counted and operation.flops:
            notes[
                f"a loop runs a number of turns that depends on the data{where}: its FLOPs and "
                f"bytes count one turn"
            ] = None
    return list(notes)


COLUMNS = ("module", "forward", "backward", "again", "share", "bytes", "parameters", "saved")
ROWS = 12  # of a table; `--all` prints all


def format_explanation(found: Explanation, selected: ModuleCost, *, everything: bool) -> str:
    """Return the explanation as text.

    Args:
        selected: the module to show; the root shows the whole loss.
        everything: whether small entries and long tables are shown in full.
    """
    most = None if everything else ROWS
    groups = [
        group
        for group in group_residuals(found.residuals)
        if group.path[: len(selected.path)] == selected.path
    ]
    parts = [
        "\n".join(describe_step(found)),
        "\n".join(format_tree(selected, everything=everything)),
        "\n".join(format_residuals(groups, found, most)),
    ]
    if found.compiled is not None and not selected.path:
        parts += ["\n".join(format_compiled(found.compiled, most))]
    return "\n\n".join(part for part in parts if part)


def describe_step(found: Explanation) -> list[str]:
    """Return lines about the whole step: rows, FLOPs, what is computed again, what is saved."""
    model, hardware = found.flops.model, found.flops.hardware
    lines = [f"{found.name}: loss and gradient of {found.rows} rows; {found.layout}"]
    if model is not None:
        lines.append(f"needs       {format_count(model)}FLOP in products (model FLOPs)")
    if hardware is not None:
        lines.append(f"computes    {format_count(hardware)}FLOP")
    if found.recomputed:
        part = f", {share(found.recomputed, hardware or 0):.0%} of it" if hardware else ""
        lines.append(f"again       {format_count(found.recomputed)}FLOP by rematerialization{part}")
    if model is not None and hardware is not None:
        custom = hardware - model - found.recomputed
        if custom > 0.001 * hardware:
            words = "by derivatives that the code defines itself"
            lines.append(f"again       {format_count(custom)}FLOP {words}")
    shards = f", over {found.row_shards} devices" if found.row_shards > 1 else ""
    lines.append(
        f"saves       {format_bytes(found.saved)} in the forward pass for the backward pass: "
        f"{found.microbatch} rows{shards}"
    )
    lines += [f"unknown     {note}" for note in found.notes]
    lines.append(f"traced in {format_seconds(found.seconds)}; nothing was allocated")
    return lines


def format_tree(selected: ModuleCost, *, everything: bool) -> list[str]:
    """Return the modules as a tree, a line each: FLOPs of the passes, bytes, parameters, saved."""
    root = selected if everything else fold_small(selected)
    rows = [COLUMNS, *_tree_rows(root, selected, "", "")]
    used = [
        i for i in range(len(COLUMNS)) if i == 0 or any(row[i] not in {"", "-"} for row in rows[1:])
    ]
    return align_columns([[row[i] for i in used] for row in rows], right=range(1, len(used)))


def _tree_rows(
    node: ModuleCost, root: ModuleCost, first: str, rest: str
) -> Iterator[tuple[str, ...]]:
    name = node.path[-1] if node.path else "loss"
    title = f"{name} x {node.layers}" if node.layers > 1 and node.path else name
    yield (
        first + title,
        *(format_count(x) if x else "-" for x in node.flops.values()),
        f"{share(node.total, root.total):.1%}" if node.total else "-",
        format_bytes(node.bytes) if node.bytes else "-",
        format_count(node.parameters) if node.parameters else "-",
        format_bytes(node.saved) if node.saved else "-",
    )
    children = list(node.children.values())
    for child in children:
        corner, below = ("└─ ", "   ") if child is children[-1] else ("├─ ", "│  ")
        yield from _tree_rows(child, root, rest + corner, rest + below)


def format_residuals(groups: Sequence[Residual], found: Explanation, most: int | None) -> list[str]:
    """Return the table of what the forward pass saves, the largest first."""
    rows = [
        (
            each.name + (f" x {each.layers}" if each.layers > 1 else ""),
            each.array,
            format_bytes(each.bytes),
            f"{share(each.bytes, found.saved):.1%}",
            "/".join(each.path),
            str(each.source or "").partition(": ")[0],
        )
        for each in groups
        if each.kind == "computed"
    ]
    if not rows:
        return []
    head = ("saved for the backward pass", "array", "bytes", "share", "module", "source")
    lines = _table(head, rows, most, right=(2, 3))
    if held := sum(group.bytes for group in groups if group.kind == "argument"):
        lines.append(
            f"beside them it keeps {format_bytes(held)} of arguments (parameters, batch), which "
            f"exist anyway"
        )
    return lines


def format_compiled(compiled: CompiledProgram, most: int | None) -> list[str]:
    """Return the memory of the compiled program, and the table of its collectives."""
    memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in compiled.memory.items())
    lines = [
        f"compiled for {compiled.platform} in {format_seconds(compiled.seconds)}",
        f"{memory} on a device",
    ]
    if compiled.collectives:
        head = ("collective", "axes", "runs", "sends", "module")
        rows = [
            (c.kind, " x ".join(c.axes) or "other", f"{c.times:,}", format_bytes(c.sent), c.module)
            for c in compiled.collectives
        ]
        lines += ["", *_table(head, rows, most, right=(2, 3))]
    elif not compiled.unread:
        lines += ["", "no collectives: nothing is sent between devices"]
    return [*lines, *(f"not read: {note}" for note in compiled.unread)]


def _table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int | None, right: Container[int]
) -> list[str]:
    """Return the first rows in columns, and how many more there are."""
    lines = align_columns([head, *rows[:most]], right=right)
    more = len(rows) - len(rows[:most])
    return [*lines, f"and {more} more; --all prints them"] if more else lines
