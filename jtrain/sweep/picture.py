"""Picture of a sweep: the values of each setting, and their curves."""

import html
import math
from collections.abc import Mapping, Sequence

from jtrain.io.formatting import format_number
from jtrain.sweep.results import SeedGroup
from jtrain.train.hooks.curve import Number, Point

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
MOST = 40  # settings at most in a picture
LINE, LEFT, WIDE, TALL = 22, 20, 420, 260  # pixels


def draw_svg(
    title: str, metric: str, groups: Sequence[SeedGroup], curves: Mapping[str, list[Point]]
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
    height = below + (TALL + 80 + LINE * len(curves) if curves else 20)
    width = margin + WIDE + 90
    drawn = [_text(LEFT, 24, title, weight="bold"), _text(LEFT, 42, metric)]
    drawn += _dots(shown, margin)
    if curves:
        drawn += _curves(curves, below + 20, margin)
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


def _curves(curves: Mapping[str, list[Point]], top: int, left: int) -> list[str]:
    every = [p for points in curves.values() for p in points if math.isfinite(p[1])]
    if not every:
        return []
    low, high = min(y for _, y in every), max(y for _, y in every)
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    across, up = _scale(first, last, left, left + WIDE), _scale(low, high, top + TALL, top)
    drawn = [
        _line(left, top, left, top + TALL, "#57606a"),
        _line(left, top + TALL, left + WIDE, top + TALL, "#57606a"),
        _text(left - 8, up(high) + 4, format_number(high), anchor="end"),
        _text(left - 8, up(low) + 4, format_number(low), anchor="end"),
        _text(across(first), top + TALL + 18, f"{first:.0f}", anchor="middle"),
        _text(across(last), top + TALL + 18, f"step {last:.0f}", anchor="middle"),
    ]
    for index, (name, points) in enumerate(curves.items()):
        colour, y = COLOURS[index % len(COLOURS)], top + TALL + 44 + LINE * index
        line = " ".join(f"{across(x):.1f},{up(v):.1f}" for x, v in points if math.isfinite(v))
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(_line(left, y - 4, left + 20, y - 4, colour))
        drawn.append(_text(left + 28, y, name))
    return drawn


def _scale(low: Number, high: Number, to_low: Number, to_high: Number):
    """Return a function from a value to pixels, with a margin at both ends."""
    span, inside = (high - low) or 1.0, 0.04 * (to_high - to_low)
    middle = 0.5 if high == low else 0.0
    length = to_high - to_low - 2 * inside

    def scale(x: Number) -> Number:
        return to_low + inside + ((x - low) / span + middle) * length

    return scale


def _text(x: Number, y: Number, words: str, *, weight: str = "", anchor: str = "") -> str:
    style = f' font-weight="{weight}"' * bool(weight) + f' text-anchor="{anchor}"' * bool(anchor)
    return f'<text x="{x}" y="{y}"{style}>{html.escape(words)}</text>'


def _line(x: Number, y: Number, to_x: Number, to_y: Number, colour: str) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}"/>'
