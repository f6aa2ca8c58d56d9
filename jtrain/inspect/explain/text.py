"""Explanations as text: a tree of modules with their costs, and tables."""

from collections.abc import Container, Iterator, Sequence

from jtrain.inspect.explain.explain import CompiledProgram, Explanation
from jtrain.inspect.explain.modules import ModuleCost, fold_small, share
from jtrain.inspect.explain.residuals import Residual, group_residuals
from jtrain.io.formatting import align_columns, format_bytes, format_count, format_seconds

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
