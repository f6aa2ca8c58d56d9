"""The explanation as one HTML page with the computation graph, without scripts or network."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from jtrain.inspect.explain.explain import Explanation
from jtrain.inspect.explain.modules import Flow, FlowEdge, FlowNode
from jtrain.inspect.explain.text import format_explanation, format_shardings
from jtrain.inspect.report.page import render_document
from jtrain.io.formatting import format_bytes, format_count

WIDTH = 480  # units; a phone shows the drawing without scrolling
ROW, GAP, TOP = 40, 22, 40  # height of a box, space below it, space above the first
FORWARD, BACKWARD, BOX = 48, 294, 138  # left edges of the boxes, and their width
LETTERS = 20  # of a name in a box


def render_page(found: Explanation) -> str:
    """Return the page: the drawing, then the explanation and the shardings as text."""
    style = (files("jtrain.inspect.explain") / "graph.css").read_text("utf-8")
    text = format_explanation(found, found.modules, everything=False)
    parts = {
        "The computation graph": _LEGEND + draw_graph(found.flow),
        "Modules and the compiled program": f'<pre class="table">{escape(text)}</pre>',
        "Shardings": f'<pre class="table">{escape(format_shardings(found))}</pre>',
    }
    body = "".join(f"<section><h2>{title}</h2>{part}</section>\n" for title, part in parts.items())
    return render_document(f"{found.name}: what a step computes", body, style=style)


_LEGEND = (
    '<p class="legend"><span><i class="swatch" style="background:var(--c0)"></i>FLOPs forward'
    '</span><span><i class="swatch" style="background:var(--c1)"></i>FLOPs backward</span>'
    '<span><i class="swatch" style="background:var(--c3)"></i>computed again</span>'
    '<span><i class="swatch" style="background:var(--c2)"></i>bytes saved for the backward pass'
    "</span><span>dashed: to a later layer</span></p>"
)


def draw_graph(flow: Flow) -> str:
    """Return the drawing as an SVG element, coloured by the page's style."""
    nodes = list(flow.nodes)
    if not nodes:
        return ""
    height = TOP + len(nodes) * (ROW + GAP)
    top = {node.name: TOP + i * (ROW + GAP) for i, node in enumerate(nodes)}
    most = max(sum(node.flops.values()) for node in nodes) or 1.0
    saved = max(node.saved for node in nodes) or 1
    parts = [
        _text(FORWARD + BOX / 2, 16, "forward ↓", "head"),
        _text((FORWARD + BOX + BACKWARD) / 2, 16, "saved →", "head"),
        _text(BACKWARD + BOX / 2, 16, "backward ↑", "head"),
    ]
    for node in nodes:
        parts += _row(node, top[node.name], most, saved)
    order = [node.name for node in nodes]
    for edge in flow.edges:
        parts += _edge(edge, order, top)
    label = "The computation graph: modules of the forward and the backward pass"
    return (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="0 0 {WIDTH} {height}">{_MARKER}{"".join(parts)}</svg>'
    )


_MARKER = (
    '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" '
    'orient="auto"><path d="M0 0L6 3L0 6z" class="tip-arrow"/></marker></defs>'
)


def _row(node: FlowNode, y: float, most: float, saved: int) -> list[str]:
    """Return the boxes of a module in both passes, and the line of what it saves."""
    forward, backward = node.flops["forward"], node.flops["backward"]
    again = node.flops["recomputed"]
    title = f"{node.name}: {node.operations} operations"
    name = _short(node.name + (f" x {node.layers}" if node.layers > 1 else ""))
    parts = [
        f"<g><title>{escape(title)}</title>",
        _box(FORWARD, y, "forward"),
        _bar(FORWARD, y, forward / most, "forward"),
        _text(FORWARD + 6, y + 16, name, "name", "start"),
        _text(FORWARD + 6, y + 31, _flops(forward), "value", "start"),
        _box(BACKWARD, y, "backward"),
        _bar(BACKWARD, y, backward / most, "backward"),
    ]
    if again:
        parts.append(_bar(BACKWARD, y, again / most, "again", offset=backward / most))
    words = _flops(backward)
    parts.append(_text(BACKWARD + 6, y + 16, words, "value", "start"))
    if again:
        parts.append(_text(BACKWARD + 6, y + 31, f"again {_flops(again)}", "value", "start"))
    if node.saved:
        middle, width = y + ROW / 2, 1 + 9 * node.saved / saved
        left, right = FORWARD + BOX, BACKWARD
        parts.append(
            f'<line class="saved" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}" '
            f'stroke-width="{width:.1f}"/>'
        )
        held = format_bytes(node.saved)
        parts.append(_text((left + right) / 2, middle - width / 2 - 4, held, "value"))
    return [*parts, "</g>"]


def _edge(edge: FlowEdge, order: Sequence[str], top: Mapping[str, float]) -> list[str]:
    """Return the arrow of an array between two modules: straight to the next, else around."""
    first, second = order.index(edge.source), order.index(edge.target)
    title = f"<title>{escape(f'{edge.source} to {edge.target}: {edge.array}')}</title>"
    if second == first + 1:
        x, y = FORWARD + BOX / 2, top[edge.source] + ROW
        line = f'<path class="edge" d="M{x} {y}V{y + GAP - 1}" marker-end="url(#tip)"/>'
        back = BACKWARD + BOX / 2
        reverse = f'<path class="edge" d="M{back} {y + GAP}V{y + 1}" marker-end="url(#tip)"/>'
        label = _text(x + 7, y + GAP / 2 + 4, _short_array(edge.array), "array", "start")
        return [f"<g>{title}{line}{reverse}{label}</g>"]
    y1, y2 = top[edge.source] + ROW * 0.7, top[edge.target] + ROW * 0.3
    bend = min(44, 10 + 6 * abs(second - first))
    kind = "edge" if second > first else "edge loop"
    right = BACKWARD + BOX
    there = f"M{FORWARD} {y1}C{FORWARD - bend} {y1} {FORWARD - bend} {y2} {FORWARD - 1} {y2}"
    back = f"M{right} {y2}C{right + bend} {y2} {right + bend} {y1} {right + 1} {y1}"
    lines = "".join(f'<path class="{kind}" d="{d}" marker-end="url(#tip)"/>' for d in (there, back))
    return [f"<g>{title}{lines}</g>"]


def _flops(count: float) -> str:
    return f"{format_count(count)}FLOP" if count else "no product"


def _short(name: str) -> str:
    return name if len(name) <= LETTERS else f"…{name[1 - LETTERS :]}"


def _short_array(array: str) -> str:
    """Return `f32[16,64]` for `float32[16,64]`."""
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if array.startswith(long):
            return short + array.removeprefix(long)
    return array


def _box(x: float, y: float, kind: str) -> str:
    return f'<rect class="box {kind}" x="{x}" y="{y}" width="{BOX}" height="{ROW}" rx="5"/>'


def _bar(x: float, y: float, share: float, kind: str, offset: float = 0.0) -> str:
    width = max(0.0, min(1.0, share)) * (BOX - 2)
    left = x + 1 + offset * (BOX - 2)
    return (
        f'<rect class="bar {kind}" x="{left:.1f}" y="{y + ROW - 5}" width="{width:.1f}" '
        f'height="4"/>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
