"""Picture of a sweep: the values of each setting, and their curves."""

import html
import math
from collections.abc import Mapping, Sequence

from jtrain.checkpoint.retention import BestMetric
from jtrain.io.formatting import format_number
from jtrain.sweep.results import SeedGroup
from jtrain.train import svg_chart
from jtrain.train.hooks.curve import Number, Point

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
MOST = 40  # settings at most in a picture
LINE, LEFT, WIDE = 22, 20, 420  # pixels


def draw_svg(
    title: str, goal: BestMetric, groups: Sequence[SeedGroup], curves: Mapping[str, list[Point]]
) -> str:
    """Draw a dot per seed and a bar at the mean, the best setting on top; curves below.

    Args:
        groups: the best first; at most 40 are drawn.
        curves: (step, value) of some groups, by name.
    """
    shown = [group for group in groups if math.isfinite(group.mean)][:MOST]
    names = [group.name for group in shown]
    margin = LEFT + 7 * max(map(len, names), default=0)
    below = 70 + LINE * len(shown)
    height = below + 20 + (svg_chart.HEIGHT if curves else 0)
    width = margin + WIDE + 90
    words = f"{goal.name} at the last evaluation, {goal.end} first"
    drawn = [_text(LEFT, 24, title, weight="bold"), _text(LEFT, 42, words)]
    drawn += _dots(shown, margin)
    if curves:
        lines = {name: {int(step): y for step, y in points} for name, points in curves.items()}
        chart = svg_chart.chart(goal.name, lines)
        drawn.append(f'<g transform="translate({margin}, {below})">{chart}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _dots(shown: Sequence[SeedGroup], margin: int) -> list[str]:
    values = [v for group in shown for v in group.values.values() if math.isfinite(v)]
    if not values:
        return []
    across = _scale(min(values), max(values), margin, margin + WIDE)
    drawn = []
    for index, group in enumerate(shown):
        y, colour = 70 + LINE * index, COLOURS[index % len(COLOURS)]
        drawn.append(_text(LEFT, y + 4, group.name))
        drawn.append(_line(margin, y, margin + WIDE, y, "#d0d7de"))
        x = across(group.mean)
        drawn.append(f'<rect x="{x - 1.5:.1f}" y="{y - 7}" width="3" height="14" fill="{colour}"/>')
        drawn += [
            f'<circle cx="{across(v):.1f}" cy="{y}" r="3.5" fill="{colour}" fill-opacity="0.5"/>'
            for v in group.values.values()
            if math.isfinite(v)
        ]
        drawn.append(_text(margin + WIDE + 10, y + 4, format_number(group.mean)))
    return drawn


def _scale(low: Number, high: Number, to_low: Number, to_high: Number):
    """Return a function from a value to pixels, with a margin at both ends."""
    span, inside = (high - low) or 1.0, 0.04 * (to_high - to_low)
    middle = 0.5 if high == low else 0.0
    length = to_high - to_low - 2 * inside

    def scale(x: Number) -> Number:
        return to_low + inside + ((x - low) / span + middle) * length

    return scale


def _text(x: Number, y: Number, words: str, *, weight: str = "") -> str:
    style = f' font-weight="{weight}"' * bool(weight)
    return f'<text x="{x}" y="{y}"{style}>{html.escape(words)}</text>'


def _line(x: Number, y: Number, to_x: Number, to_y: Number, colour: str) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}"/>'
