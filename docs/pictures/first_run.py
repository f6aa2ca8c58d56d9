"""The picture of the README: the output of a command, as SVG.

    jtrain run shakespeare 2>&1 | tee first_run.txt
    python3 docs/pictures/first_run.py first_run.txt docs/pictures/first_run.svg

Lines above the last steps are dropped; nothing else is changed.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

COMMAND = "$ jtrain run shakespeare"
STEPS = 4  # lines of progress that are shown
WIDTH, LINE = 8.4, 18  # of one character, in pixels
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
STYLE = f"font: 14px {FONTS}; white-space: pre"


def chosen(lines: list[str]) -> list[str]:
    """Returns the last steps, the curve, the sample and the validation of a run's output."""
    steps = [index for index, line in enumerate(lines) if line.startswith("step ")]
    end = next(index for index, line in enumerate(lines) if line.startswith("validation at step"))
    return [COMMAND, "...", *lines[steps[-STEPS] : end + 1]]


def draw(lines: list[str]) -> str:
    """Returns an SVG of the lines on a dark ground."""
    width = round(max(map(len, lines)) * WIDTH) + 32
    height = len(lines) * LINE + 28
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    texts = []
    for row, line in enumerate(lines):
        color = "#7ee787" if row == 0 else "#e6edf3"
        texts.append(f'<text x="16" y="{28 + LINE * row}" fill="{color}">{escape(line)}</text>')
    ground = '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>'
    title = "<title>The end of the first run: progress, loss curve, a sample of text</title>"
    return "\n".join(
        [
            head,
            title,
            ground,
            f'<g style="{STYLE}" xml:space="preserve">',
            *texts,
            "</g>",
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(chosen(source.read_text().splitlines())))
