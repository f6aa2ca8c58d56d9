"""The explanation as one HTML page, without other files, scripts or network."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from jtrain.inspect.explain.compiled import CompiledProgram
from jtrain.inspect.explain.drawing import draw_graph
from jtrain.inspect.explain.explain import Explanation
from jtrain.inspect.explain.modules import ModuleCost, fold_small, share
from jtrain.inspect.explain.residuals import group_residuals
from jtrain.inspect.explain.text import describe_step, format_shardings, format_tree
from jtrain.inspect.report.document import render_document
from jtrain.inspect.report.overview import render_table
from jtrain.io.formatting import format_bytes, format_count

ROWS = 40  # of a table


def render_page(found: Explanation) -> str:
    """Return the page: the drawing, then modules, saved arrays, compiled program, shardings."""
    title = f"{found.name}: what a step computes"
    style = (files("jtrain.inspect.explain") / "graph.css").read_text("utf-8")
    parts = [
        _facts(found),
        _section("The computation graph", _LEGEND + draw_graph(found.flow)),
        _section("Modules", _modules(found)),
        _section("Saved for the backward pass", _residuals(found)),
        _section("Compiled program", _compiled(found.compiled) if found.compiled else ""),
        _section("Shardings", _pre(format_shardings(found))),
        _section("As text", _pre("\n".join([*describe_step(found), "", *_tree(found)]))),
    ]
    return render_document(title, f"{''.join(parts)}\n", style=style)


_LEGEND = (
    '<p class="legend"><span><i class="swatch" style="background:var(--c0)"></i>FLOPs forward'
    '</span><span><i class="swatch" style="background:var(--c1)"></i>FLOPs backward</span>'
    '<span><i class="swatch" style="background:var(--c3)"></i>computed again</span>'
    '<span><i class="swatch" style="background:var(--c2)"></i>bytes saved for the backward pass'
    "</span><span>dashed: to a later layer</span></p>"
)


def _facts(found: Explanation) -> str:
    flops = found.flops
    entries = {
        "rows in a batch": f"{found.rows:,}",
        "layout": found.sharding.line,
        "model FLOPs": _flop(flops.model),
        "computed FLOPs": _flop(flops.hardware),
        "computed again by remat": _flop(found.recomputed),
        f"saved, {found.microbatch} rows": format_bytes(found.saved),
    }
    if found.compiled:
        held = found.compiled.memory
        entries["temporaries of the program"] = format_bytes(held["temporaries"])
    cells = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in entries.items()
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in found.notes)
    return f'<dl class="facts">{cells}</dl>{notes}'


def _modules(found: Explanation) -> str:
    root = fold_small(found.modules)
    head = ("module", "share", "forward", "backward", "again", "bytes", "parameters", "saved")
    return _table(head, list(_module_rows(root, found.modules, 0)))


def _module_rows(node: ModuleCost, root: ModuleCost, depth: int) -> Iterator[tuple[str, ...]]:
    name = node.path[-1] if node.path else "loss"
    layers = f" x {node.layers}" if node.layers > 1 and node.path else ""
    indent = f'<span style="padding-left:{depth * 0.9:g}em">{escape(name + layers)}</span>'
    part = share(node.total, root.total)
    bar = f'{part:.1%}<i class="share" style="width:{100 * part:.1f}%"></i>' if node.total else "-"
    yield (
        indent,
        bar,
        *(format_count(x) if x else "-" for x in node.flops.values()),
        format_bytes(node.bytes) if node.bytes else "-",
        format_count(node.parameters) if node.parameters else "-",
        format_bytes(node.saved) if node.saved else "-",
    )
    for child in node.children.values():
        yield from _module_rows(child, root, depth + 1)


def _residuals(found: Explanation) -> str:
    rows = []
    for residual, count in group_residuals(found.residuals)[:ROWS]:
        if residual.kind != "computed":
            continue
        times = f" x {count}" if count > 1 else ""
        part = share(residual.bytes * count, found.saved)
        bar = f'{part:.1%}<i class="share" style="width:{100 * part:.1f}%"></i>'
        cells = (residual.name + times, residual.array, format_bytes(residual.bytes * count))
        where = ("/".join(residual.path), str(residual.source or ""))
        rows.append((*map(escape, cells), bar, *map(escape, where)))
    if not rows:
        return ""
    return _table(("array", "shape", "bytes", "share", "module", "source"), rows)


def _compiled(compiled: CompiledProgram) -> str:
    fusions = [
        (escape(f.module), f.kind, f"{f.fusions:,}", f"{f.times:,}", format_bytes(f.written),
         escape(f.operations))
        for f in compiled.fusions[:ROWS]
    ]  # fmt: skip
    text = (
        f"<p>For {escape(compiled.platform)}: {compiled.instructions:,} instructions, "
        f"{sum(f.fusions for f in compiled.fusions):,} of them fusions of {compiled.fused:,} "
        f"operations.</p>"
    )
    text += _table(("fusion in", "kind", "count", "runs", "writes", "operations inside"), fusions)
    if not compiled.collectives:
        return text + "<p>No collectives: nothing is sent between devices.</p>"
    rows = [
        (c.kind, escape(c.axes), f"{c.times:,}", format_bytes(c.sent), escape(c.module))
        for c in compiled.collectives[:ROWS]
    ]
    head = ("collective", "axes", "runs", "a device sends", "module")
    return f"{text}<h3>Collectives</h3>{_table(head, rows)}"


def _tree(found: Explanation) -> list[str]:
    return format_tree(found.modules, everything=False)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render_table(head, rows)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def _pre(text: str) -> str:
    return f'<pre class="table">{escape(text)}</pre>'


def _flop(count: float | None) -> str:
    return "unknown" if count is None else f"{format_count(count)}FLOP" if count else "none"
