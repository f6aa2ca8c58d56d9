"""Line charts as SVG text for a notebook, without a library or script, in light and dark mode."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jtrain.io.formatting import format_count

Points: TypeAlias = Mapping[Any, Any]  # a number by step
WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 28, 34
COLORS = ("#1f77b4", "#d95f02", "#2a9d4e", "#9467bd")  # distinct for the colour-blind


def chart(
    title: str,
    lines: Mapping[str, Points],
    *,
    over: str = "step",
    label: Callable[[float], str] | None = None,
) -> str:
    """Return a chart of named lines over the step; "" without a finite point.

    Values that are not finite are omitted. Positive values that span more than three powers of ten
    get a logarithmic axis, and the title says so.

    Args:
        over: the name of the horizontal axis.
        label: formats a number of that axis; by default as a step.
    """
    middle = sum if label else lambda ends: 2 * (sum(ends) // 2)  # steps are whole numbers
    label = label or _format_step
    drawn = {name: _finite(points) for name, points in lines.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    log = min(values) > 0 and max(values) > 1000 * min(values)
    up = math.log10 if log else float
    low, high = _add_margin(up(min(values)), up(max(values)))
    first, last = min(steps), max(max(steps), min(steps) + 1)
    x = lambda step: LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    y = lambda value: TOP + (high - up(value)) / (high - low) * (HEIGHT - TOP - BOTTOM)
    parts = [_text(LEFT, 14, title + (" (log)" if log else ""), weight="bold")]
    for tick in _ticks(low, high):
        value = 10**tick if log else tick
        parts.append(_rule(y(value)) + _text(LEFT - 6, y(value) + 4, f"{value:.3g}", "end"))
    for step in sorted({first, middle((first, last)) / 2, last}):
        anchor = "end" if step == last and len(label(step)) > 4 else "middle"
        parts.append(_text(x(step), HEIGHT - BOTTOM + 16, label(step), anchor))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, over, "middle"))
    names = zip(drawn, COLORS * len(drawn), strict=False)
    for place, (name, color) in enumerate(names):
        dots = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in drawn[name])
        parts.append(_line(dots, color, single=len(drawn[name]) == 1))
        parts.append(_text(WIDTH - RIGHT, TOP + 10 + 14 * place, name, "end", color=color))
    words = html.escape(f"{title} over the {over}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{words}" '
        f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _format_step(step: float) -> str:
    return f"{step:.0f}" if step < 1e5 else format_count(step)


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(step, float(value)) for step, value in points.items() if math.isfinite(value)]


def _add_margin(low: float | int, high: float | int) -> tuple[float, float]:
    """Return the range with some room at both ends, also if it is a single value."""
    room = 0.05 * (high - low) or abs(low) / 2 or 0.5
    return low - room, high + room


def _ticks(low: float | int, high: float | int) -> Sequence[float | int]:
    """Return three to seven round values in the range."""
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    gap = next(g * power for g in (5, 2, 1) if g * power <= rough)
    return [i * gap for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]


def _rule(y: float | int) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
        f'stroke-opacity="0.15"/>'
    )


def _text(
    x: float | int,
    y: float | int,
    text: str,
    anchor: str = "start",
    *,
    color: str = "",
    weight: str = "",
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color or "currentColor"}"'
        f"{bold}>{html.escape(text)}</text>"
    )


def _line(points: str, color: str, *, single: bool) -> str:
    if single:
        x, _, y = points.partition(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
