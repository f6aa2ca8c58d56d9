"""Charts of curves over the step, as text or SVG, and pictures that a model draws, as PNG files."""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jtrain.errors import DataError
from jtrain.io.formatting import format_count
from jtrain.io.png import encode_png, tile_images
from jtrain.io.regular_files import atomic_write

Number: TypeAlias = float | int
Point: TypeAlias = tuple[Number, Number]  # step, value
Points: TypeAlias = Mapping[Any, Any] | Iterable[Point]  # ascending by step
Label: TypeAlias = Callable[[Number], str]  # formats a number of the horizontal axis

# Dots of a braille character by row and column (4 x 2): bits above U+2800.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_MARKS = "●▲■◆"
_WIDTH, _HEIGHT = 380, 240  # of an SVG, in pixels, and its margins
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 28, 34
_COLORS = ("#1f77b4", "#d95f02", "#2a9d4e", "#9467bd")  # distinct for the colour-blind


def format_step(step: Number) -> str:
    """Format a step: `2500`, `1.25M`."""
    return f"{step:.0f}" if step < 1e5 else format_count(step)


def text_chart(
    lines: Mapping[str, Points], *, width: int = 80, height: int = 20, label: Label = format_step
) -> str:
    """Return a chart of `width` x `height` characters: a line for the first name, else marks.

    Values that are not finite are omitted; without points the text is empty.
    """
    drawn = _finite(lines)
    if not drawn:
        return ""
    (first, last), (low, high) = _ranges(drawn)
    low, high = (
        (low, high) if high > low else (low - (abs(low) or 1) / 2, low + (abs(low) or 1) / 2)
    )
    ticks, digits = _ticks(low, high)
    names = [f"{tick:.{digits}f}" for tick in ticks]
    margin = max(map(len, names)) + 1
    columns, rows = max(8, width - margin - 1), max(3, height - 3)

    def dot(x: Number, y: Number) -> tuple[int, int]:
        across = (x - first) / (last - first) if last > first else 0.0
        down = (high - y) / (high - low)
        return round(across * (2 * columns - 1)), round(down * (4 * rows - 1))

    dots, marks, legend = np.zeros((4 * rows, 2 * columns), bool), {}, []
    for i, (name, points) in enumerate(drawn.items()):
        at = [dot(*point) for point in points]
        mark = _MARKS[(i - 1) % len(_MARKS)]
        legend.append(f"{mark if i else '⠤⠤⠤'} {name}")
        if i:
            marks |= {(y // 4, x // 2): mark for x, y in at}
            continue
        for (x, y), (to_x, to_y) in zip(at, at[1:] or at, strict=False):
            far = max(abs(to_x - x), abs(to_y - y), 1)
            part = np.arange(far + 1) / far
            dots[
                y + np.rint(part * (to_y - y)).astype(int),
                x + np.rint(part * (to_x - x)).astype(int),
            ] = True
    bits = (dots.reshape(rows, 4, columns, 2) * _DOTS[:, None]).sum(axis=(1, 3))
    labels = {dot(first, tick)[1] // 4: name for tick, name in zip(ticks, names, strict=True)}
    picture = [
        f"{labels.get(i, ''):>{margin - 1}} {'┤' if i in labels else '│'}"
        + "".join(
            marks.get((i, j)) or (chr(0x2800 + bit) if bit else " ") for j, bit in enumerate(row)
        )
        for i, row in enumerate(bits)
    ]
    axis, below = _text_axis(first, last, columns, label)
    picture += [" " * margin + "└" + axis, " " * (margin + 1) + below]
    words = "   ".join(legend)
    picture.append(" " * min(margin + 1, max(0, width - len(words))) + words)
    return "\n".join(line.rstrip() for line in picture) + "\n"


def svg_chart(
    title: str, lines: Mapping[str, Points], *, over: str = "step", label: Label = format_step
) -> str:
    """Return a chart of named lines as SVG, in light and dark mode; "" without a finite point.

    Positive values that span more than three powers of ten get a logarithmic axis, and the title
    says so. Values that are not finite are omitted.
    """
    drawn = _finite(lines)
    if not drawn:
        return ""
    (first, last), (low, high) = _ranges(drawn)
    last = max(last, first + 1)
    log = low > 0 and high > 1000 * low
    up = math.log10 if log else float
    room = 0.05 * (up(high) - up(low)) or abs(up(low)) / 2 or 0.5
    low, high = up(low) - room, up(high) + room
    x = lambda step: _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
    y = lambda value: _TOP + (high - up(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
    parts = [_text(_LEFT, 14, title + (" (log)" if log else ""), weight="bold")]
    for tick in _ticks(low, high)[0]:
        value = 10**tick if log else tick
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="currentColor" stroke-opacity="0.15"/>'
        )
        parts.append(_text(_LEFT - 6, y(value) + 4, f"{value:.3g}", "end"))
    middle = (first + last) // 2 if label is format_step else (first + last) / 2
    for step in sorted({first, middle, last}):
        anchor = "end" if step == last and len(label(step)) > 4 else "middle"
        parts.append(_text(x(step), _HEIGHT - _BOTTOM + 16, label(step), anchor))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, over, "middle"))
    for i, (name, points) in enumerate(drawn.items()):
        color = _COLORS[i % len(_COLORS)]
        dots = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        dots = dots if len(points) > 1 else f"{dots} {dots}"  # round ends make a point of it
        parts.append(
            f'<polyline points="{dots}" fill="none" stroke="{color}" stroke-linecap="round" '
            f'stroke-width="{1.5 if len(points) > 1 else 6}"/>'
        )
        parts.append(_text(_WIDTH - _RIGHT, _TOP + 10 + 14 * i, name, "end", color=color))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{html.escape(f"{title} over the {over}")}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _finite(lines: Mapping[str, Points]) -> dict[str, list[Point]]:
    pairs = {name: dict(points).items() for name, points in lines.items()}
    finite = {name: [(x, y) for x, y in each if math.isfinite(y)] for name, each in pairs.items()}
    return {name: points for name, points in finite.items() if points}


def _ranges(lines: Mapping[str, list[Point]]) -> tuple[Point, Point]:
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    return (min(steps), max(steps)), (float(min(values)), float(max(values)))


def _ticks(low: float, high: float) -> tuple[Sequence[float], int]:
    rough = (high - low) / 4
    power = math.floor(math.log10(rough))
    gap = next(g * 10.0**power for g in (5, 2, 1) if g * 10.0**power <= rough)
    ticks = [i * gap for i in range(math.ceil(low / gap), math.floor(high / gap) + 1)]
    return ticks, max(0, -power)


def _text_axis(first: Number, last: Number, columns: int, label: Label) -> tuple[str, str]:
    """Return the axis line with a stub at five steps, and the line of step labels below it."""
    axis, labels = ["─"] * columns, [" "] * columns
    for i in range(5 if last > first else 1):
        at = round(i / 4 * (columns - 1))
        name = label(first + (last - first) * i / 4)
        begin = max(0, min(at - len(name) // 2, columns - len(name)))
        if all(c == " " for c in labels[max(0, begin - 1) : begin + len(name) + 1]):
            axis[at] = "┬"
            labels[begin : begin + len(name)] = name
    return "".join(axis), "".join(labels)


def _text(
    x: float, y: float, text: str, anchor: str = "start", *, color: str = "", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{color or "currentColor"}">{html.escape(text)}</text>'
    )


def write_pictures(folder: Path, step: int, pictures: Mapping[str, Any]) -> list[Path]:
    """Write the images b h w c of each name as one grid, `NAME-STEP.png`; return the files.

    Raises:
        DataError: if a name cannot be a file name, or its value is not an array of images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, images in pictures.items():
        if not name or set(name) & set('/\\:*?"<>|') or name.startswith("."):
            raise DataError(f"a picture is called {name!r}; give it a valid file name: samples")
        try:
            picture = encode_png(tile_images(np.asarray(images)))
        except DataError as error:
            raise DataError(f"picture {name}: {error}") from None
        files.append(folder / f"{name}-{step}.png")
        atomic_write(files[-1], picture)
    return files
