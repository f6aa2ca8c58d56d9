"""The bar chart of the README: errors of the exhibits of `jtrain museum`, and jtrain's own.

    python3 docs/pictures/museum.py docs/pictures/museum.svg

Runs `jtrain museum --json` and draws its numbers (a minute on two cores).
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from killed_run import FONT

WIDTH, TOP, LINE, LEFT, RIGHT = 860, 76, 23, 160, 235  # pixels; a bar is 15 high
CAUSES = 695  # where the column of causes begins
LOW, HIGH = -8, 2  # powers of ten
COLORS = {"gradient": "#ff7b72", "update": "#e3b341", "loss": "#e3b341", "jtrain": "#7ee787"}


def draw(records: Sequence[dict[str, Any]]) -> str:
    """Return the SVG: a bar for each exhibit, the last one for jtrain's largest error."""
    worst = max(record["jtrain"] for record in records)
    rows = [(r["exhibit"], r["error"], r["error_of"], r["cause"]) for r in records]
    rows.append(("jtrain", worst, "jtrain", "worst of the twelve"))
    height = TOP + LINE * len(rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">',
        "<title>Relative errors of twelve public defects of trainers, and of jtrain</title>",
        '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
        f'<g style="font: 13px {FONT}" fill="#8b949e">',
        '<text x="20" y="28" fill="#7ee787">$ jtrain museum</text>',
        '<text x="20" y="52">relative error, 2 microbatches x 2 devices: '
        f'<tspan fill="{COLORS["gradient"]}">gradient</tspan>, '
        f'<tspan fill="{COLORS["loss"]}">update or reported loss</tspan></text>',
        f'<text x="{CAUSES}" y="52">jtrain check</text>',
        *[_tick(power, height) for power in range(LOW, HIGH + 1, 2)],
        *[line for row, each in enumerate(rows) for line in _bar(row, *each)],
        "</g>",
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _x(error: float) -> float:
    share = (math.log10(error) - LOW) / (HIGH - LOW)
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(share, 0), 1)


def _tick(power: int, height: int) -> str:
    x = _x(10.0**power)
    label = f"1e{power}" if power else "1"
    return (
        f'<rect x="{x:.0f}" y="{TOP - 8}" width="1" height="{height - TOP - 16}" fill="#21262d"/>'
        f'<text x="{x:.0f}" y="{height - 10}" text-anchor="middle">{label}</text>'
    )


def _bar(row: int, name: str, error: float | None, kind: str, cause: str) -> list[str]:
    """Return a name, a bar with its error, and the cause; an error that is None is not finite."""
    y, end = TOP + LINE * row, _x(math.inf if error is None else error)
    label = "NaN" if error is None else f"{error:.0e}" if error < 1e-3 else f"{error:.2g}"
    color = COLORS[kind]
    return [
        f'<text x="20" y="{y + 12}" fill="#e6edf3">{name}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.0f}" height="15" rx="2" fill="{color}"/>'
        f'<text x="{end + 8:.0f}" y="{y + 12}" fill="#e6edf3">{label}</text>',
        f'<text x="{CAUSES}" y="{y + 12}">{cause}</text>',
    ]


if __name__ == "__main__":
    command = [sys.executable, "-m", "jtrain", "museum", "--json"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    Path(sys.argv[1]).write_text(draw(json.loads(answer)["exhibits"]))
