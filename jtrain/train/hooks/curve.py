"""Curves as text: a plot of a run for a terminal, a log or an e-mail."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from jtrain.io.formatting import format_count

Number: TypeAlias = float | int
Point: TypeAlias = tuple[Number, Number]  # step, value

# Dots of a braille character by row and column (4 x 2): bits above U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARKS, _MARKS_ASCII = "●▲■◆", "o+x%"
_FRAME, _FRAME_ASCII = "│┤└─┬", "|++-+"


def curve(
    points: Mapping[str, Iterable[Point]],
    *,
    width: int = 80,
    height: int = 20,
    ascii: bool = False,
    label: Callable[[Number], str] | None = None,
) -> str:
    """Return a plot of `width` x `height` characters: a line for the first label, else marks.

    Values that are not finite are omitted; without points the text is empty.

    Args:
        points: (step, value) pairs by label, ascending by step.
        width: characters.
        height: lines, with axis and legend.
        ascii: draw with ASCII only; `only_ascii` says whether a stream needs it.
        label: formats a number of the horizontal axis; by default as a step.
    """
    series = {label: _finite(pairs) for label, pairs in points.items()}
    series = {label: pairs for label, pairs in series.items() if pairs}
    if not series:
        return ""
    every = [point for pairs in series.values() for point in pairs]
    low, high = _range(min(y for _, y in every), max(y for _, y in every))
    ticks, digits = _ticks(low, high)
    names = [f"{tick:.{digits}f}" for tick in ticks]
    margin = max(map(len, names)) + 1
    columns, lines = max(8, width - margin - 1), max(3, height - 3)
    canvas = _Canvas(
        columns=columns,
        lines=lines,
        x=(min(x for x, _ in every), max(x for x, _ in every)),
        y=(low, high),
        ascii=ascii,
    )
    marks, legend = (_MARKS_ASCII if ascii else _MARKS), []
    for i, (name, pairs) in enumerate(series.items()):
        mark = marks[(i - 1) % len(marks)]
        canvas.line(pairs) if i == 0 else canvas.mark(pairs, mark)
        legend.append(f"{('...' if ascii else '⠤⠤⠤') if i == 0 else mark} {name}")
    side, tick, corner, floor, stub = _FRAME_ASCII if ascii else _FRAME
    at = {canvas.line_of(value): name for value, name in zip(ticks, names, strict=True)}
    picture = [
        f"{at.get(i, ''):>{margin - 1}} {tick if i in at else side}{text}"
        for i, text in enumerate(canvas.text())
    ]
    axis, labels = _steps_axis(canvas.x, columns, floor, stub, label or _step_name)
    picture += [" " * margin + corner + axis, " " * (margin + 1) + labels]
    below = "   ".join(legend)
    picture.append(" " * min(margin + 1, max(0, width - len(below))) + below)
    return "\n".join(line.rstrip() for line in picture) + "\n"


def smooth(points: Iterable[Point], share: float = 0.02) -> list[Point]:
    """Return the points, each value averaged over about `share` of all points, those before it.

    The exponential mean has no bias: its first value is the first point's. Values that are not
    finite are omitted.
    """
    finite = _finite(points)
    decay = 1 - 1 / max(1.0, share * len(finite))
    total, weight, averages = 0.0, 0.0, []
    for x, y in finite:
        total, weight = decay * total + y, decay * weight + 1
        averages.append((x, total / weight))
    return averages


def only_ascii(encoding: str | None) -> bool:
    """Return whether a stream of this encoding (`sys.stdout.encoding`) shows only ASCII plots."""
    try:
        f"⠤{_MARKS}{_FRAME}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


class _Canvas:
    """Grid of characters, 2 x 4 dots each (1 x 1 in ASCII), over a range of x and of y."""

    def __init__(
        self,
        *,
        columns: int,
        lines: int,
        x: Point,
        y: Point,
        ascii: bool,
    ):
        self.x, self._y, self._lines = x, y, lines
        self._wide, self._tall = (1, 1) if ascii else (2, 4)
        self._size = columns * self._wide, lines * self._tall
        self._cells = [[0] * columns for _ in range(lines)]
        self._marks: dict[tuple[int, int], str] = {}
        self._ascii = ascii

    def line(self, points: Sequence[Point]) -> None:
        """Draw points and the lines between them."""
        dots = [self._dot(*point) for point in points]
        for (x, y), (to_x, to_y) in zip(dots, dots[1:] or dots, strict=False):
            far = max(abs(to_x - x), abs(to_y - y), 1)
            for i in range(far + 1):
                self._set(x + round(i * (to_x - x) / far), y + round(i * (to_y - y) / far))

    def mark(self, points: Sequence[Point], mark: str) -> None:
        """Draw a character at each point, over existing dots."""
        for point in points:
            x, y = self._dot(*point)
            self._marks[y // self._tall, x // self._wide] = mark

    def line_of(self, y: Number) -> int:
        """Return the line of text that holds a value, 0 at the top."""
        return self._dot(self.x[0], y)[1] // self._tall

    def text(self) -> list[str]:
        """Return the lines."""

        def character(bits: int) -> str:
            return " " if not bits else "." if self._ascii else chr(0x2800 + bits)

        return [
            "".join(self._marks.get((i, j)) or character(bits) for j, bits in enumerate(cells))
            for i, cells in enumerate(self._cells)
        ]

    def _dot(self, x: Number, y: Number) -> tuple[int, int]:
        (left, right), (low, high), (wide, tall) = self.x, self._y, self._size
        across = (x - left) / (right - left) if right > left else 0.0
        return round(across * (wide - 1)), round((high - y) / (high - low) * (tall - 1))

    def _set(self, x: int, y: int) -> None:
        bit = _DOTS[y % self._tall][x % self._wide]
        self._cells[y // self._tall][x // self._wide] |= bit


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _range(low: Number, high: Number) -> tuple[Number, Number]:
    """Return the range to draw; a range around the value if there is only one."""
    half = (abs(low) or 1) / 2
    return (low, high) if high > low else (low - half, low + half)


def _ticks(low: Number, high: Number) -> tuple[list[Number], int]:
    """Return three to nine round values in between, and the decimals they need."""
    rough = (high - low) / 4
    power = math.floor(math.log10(rough))
    gap = next(g * 10.0**power for g in (5, 2, 1) if g * 10.0**power <= rough)
    first, last = math.ceil(low / gap), math.floor(high / gap)
    return [i * gap for i in range(first, last + 1)], max(0, -power)


def _steps_axis(
    x: tuple[Number, Number], columns: int, floor: str, stub: str, label: Callable[[Number], str]
) -> tuple[str, str]:
    """Return the axis line with a stub at five steps, and the line of step labels below it."""
    axis, labels = [floor] * columns, [" "] * columns
    for i in range(5):
        at = round(i / 4 * (columns - 1))
        name = label(x[0] + (x[1] - x[0]) * i / 4)
        begin = max(0, min(at - len(name) // 2, columns - len(name)))
        if i and x[0] == x[1]:
            break
        if all(c == " " for c in labels[max(0, begin - 1) : begin + len(name) + 1]):
            axis[at] = stub
            labels[begin : begin + len(name)] = name
    return "".join(axis), "".join(labels)


def _step_name(step: Number) -> str:
    return f"{step:.0f}" if step < 1e5 else format_count(step)
