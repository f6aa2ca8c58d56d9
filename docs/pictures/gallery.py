"""The pictures of docs/gallery.md: the curve of each run, and what its model does.

    python3 docs/pictures/gallery.py docs/pictures

Type it where the commands of the page were typed: it reads runs/, and skips what is not there.
"""

import json
import sys
import textwrap
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np
from killed_run import FONT

import jtrain as jt
from jtrain.models import MLP

GREEN, RED, BLUE, GREY, WHITE = "#7ee787", "#ff7b72", "#79c0ff", "#8b949e", "#e6edf3"
Numbers = tuple[float, ...]
LEFT, TOP, BOTTOM = 430, 48, 240  # pixels; of the picture that is beside the curve


def text(x: float, y: float, words: object, color: str = GREY, anchor: str = "start") -> str:
    """Return a line of text."""
    place = f'x="{x:.0f}" y="{y:.0f}" fill="{color}" text-anchor="{anchor}"'
    return f'<text {place} stroke="none" xml:space="preserve">{escape(str(words))}</text>'


def plot(box: Numbers, x: Numbers, y: Numbers, lines: Any) -> list[str]:
    """Return lines (x, y, color) and points (x, y, color, diameter); `x` and `y` have the ticks."""
    left, right, top, bottom = box
    across = lambda v: left + (np.asarray(v) - x[0]) / (x[-1] - x[0]) * (right - left)
    up = lambda v: bottom - (np.clip(v, y[0], y[-1]) - y[0]) / (y[-1] - y[0]) * (bottom - top)
    drawn = [text(left - 6, float(up(v)) + 4, f"{v:g}", anchor="end") for v in y]
    drawn += [text(float(across(v)), bottom + 18, f"{v:g}", anchor="middle") for v in x]
    drawn += [f'<path d="M{left} {top}V{bottom}H{right}" stroke="#30363d"/>']
    for xs, ys, color, *size in lines:
        spots = np.stack([across(xs), up(ys)], 1)
        if not size:  # at most 160 points, each a mean
            spots = [part.mean(0) for part in np.array_split(spots, min(len(spots), 160))]
        data = ("h0M" if size else "L").join(f"{a:.0f} {b:.1f}" for a, b in spots)
        width = f'stroke-width="{(size or [1.5])[0]}" stroke-linecap="round"'
        drawn.append(f'<path d="M{data}h0" stroke="{color}" {width}/>')
    return drawn


def curve(folder: Path, key: str, ticks: Numbers) -> list[str]:
    """Return a number over the steps: of each step or of each line of the log; and validation."""
    read = lambda name: map(json.loads, (folder / name).read_text().splitlines())
    logged = list(read("metrics.jsonl"))
    points = [(row["step"], row[key]) for row in logged if key in row]
    if key == "loss":
        ends = [(row["step"] + 1 - len(row[key]), row[key]) for row in read("steps.jsonl")]
        points = [(first + i, x) for first, numbers in ends for i, x in enumerate(numbers)]
    measured = lambda row: row.get(f"valid/{key}", row.get("valid/accuracy"))
    valid = [(row["step"], measured(row)) for row in logged if "valid/rows" in row]
    points = [point for point in points if point[1] <= ticks[-1]]
    lines = (*np.array(points).T, BLUE), (*np.array(valid).T, GREEN, 6)
    last, value = valid[-1]
    titles = text(56, 28, key, BLUE), text(380, 28, f"validation: {value:.4g}", GREEN, "end")
    return [*titles, *plot((56, 380, TOP, BOTTOM), (0, last // 2, last), ticks, lines)]


def sample(run: Any) -> list[str]:
    """Return the end of the samples of a run."""
    lines = (run.directory / "samples.txt").read_text().splitlines()[-10:]
    lines = [part for line in lines for part in textwrap.wrap(line, 52) or [""]]
    return [text(LEFT, TOP + 10 + 20 * i, line, WHITE) for i, line in enumerate(lines[-10:])]


def confusion(run: Any) -> list[str]:
    """Return how many held-out rows of each class have which answer."""
    rows = run.experiment.valid[0]
    answers = run.predict({name: rows[name] for name in run.inputs})["label"]
    pairs = list(zip(rows["label"], answers, strict=True))
    at = lambda i, j: (LEFT + 30 + 36 * j, TOP + 12 + 18 * i)
    drawn = [text(*at(i, -0.8), i, anchor="middle") for i in range(10)]
    drawn += [text(*at(10.8, i), i, anchor="middle") for i in range(10)]
    for i, j in sorted(set(pairs)):
        drawn.append(text(*at(i, j), pairs.count((i, j)), GREEN if i == j else RED, "middle"))
    return drawn


def vae(run: Any) -> list[str]:
    """Return the images of the samples, a stroke for each two characters of the text."""
    lines = (run.directory / "samples.txt").read_text().splitlines()[-26:]
    cells = [(x, i, k) for k, line in enumerate(lines) for i, x in enumerate(line[::2])]
    drawn = [f'<g transform="translate({LEFT} {TOP + 10}) scale(5.7)" stroke="{WHITE}">']
    for shade, character in enumerate(" .:-=+*#%@"):  # as in experiments/vae.py
        data = "".join(f"M{i} {k}h1" for x, i, k in cells if x == character)
        drawn.append(f'<path d="{data}" stroke-opacity="{shade / 9:.2f}"/>')
    return [*drawn, "</g>"]


def gan(run: Any) -> list[str]:
    """Return points of the generator."""
    net = MLP(inputs=2, widths=run.config.model.widths, classes=2).build()
    noise = np.float32(np.random.default_rng(0).normal(size=(1000, 2)))
    make = lambda params, batch: net.apply(params["generator"], {}, batch["z"])[0]
    box, scale = (LEFT + 100, LEFT + 292, TOP, BOTTOM), (-1.5, 0, 1.5)
    return plot(box, scale, scale, [(*run.predict({"z": noise}, make).T, GREEN, 2)])


def heat(run: Any) -> list[str]:
    """Return the heat along the rod at four times, of the network and of the solution."""
    x = np.linspace(0, 1, 41, dtype=np.float32)
    times = [np.full_like(x, t) for t in (0, 0.05, 0.2, 1)]
    lines = [(x, run.predict({"x": x, "t": t}), BLUE) for t in times]
    lines += [(x[::2], run.config.data.exact(x, t)[::2], GREEN, 4) for t in times]
    return plot((LEFT + 40, 840, TOP, BOTTOM), (0, 0.5, 1), (0, 0.5, 1), lines)


def pole(run: Any) -> list[str]:
    """Return the angle of the pole in eight episodes, before training and after it."""
    from experiments.policy_gradient import rollout  # jt.load has found the folder

    net, lines = MLP(inputs=4, widths=run.config.model.widths, classes=3).build(), []
    for params, color in (net.init(jax.random.key(0))[0], RED), (run.params, GREEN):
        played = rollout(net, params, jax.random.split(jax.random.key(1), 8), 500, greedy=True)
        states, _, alive = map(np.asarray, played)
        angles = [np.rad2deg(x[up, 2]) for x, up in zip(states, alive, strict=True)]
        lines += [(np.arange(len(x)), x, color) for x in angles]
    return plot((LEFT + 40, 840, TOP, BOTTOM), (0, 250, 500), (-12, 0, 12), lines)


RUNS = {
    "shakespeare": ("loss", (1, 2, 3, 4), sample, ""),
    "digits": ("loss", (0, 1, 2), confusion, "held-out digits (rows) by answer (columns)"),
    "mnist1d_cnn": ("loss", (0, 1, 2), confusion, "held-out curves (rows) by answer (columns)"),
    "vae": ("loss", (90, 120, 150, 180), vae, "digits that nobody wrote"),
    "gan": ("loss", (1.35, 1.5, 1.65), gan, "1,000 points of the generator"),
    "heat": ("loss", (0, 0.01, 0.02), heat, "heat at four times; points: the solution"),
    "grpo": ("reward", (0.7, 0.8, 0.9, 1), sample, "answers of the last step, and their rewards"),
    "policy_gradient": ("return", (0, 250, 500), pole, "degrees of the pole; red: untrained"),
}

for name, (key, ticks, picture, title) in RUNS.items():
    if (folder := Path("runs", name)).is_dir():
        parts = [*curve(folder, key, ticks), text(LEFT, 28, title), *picture(jt.load(name))]
        ground = f'<title>{name}</title><rect width="860" height="270" rx="8" fill="#0d1117"/>'
        head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 270" width="860">'
        group = f'<g style="font: 13px {FONT}" fill="none">'
        lines = [head, ground, group, *parts, "</g>", "</svg>", ""]
        (Path(sys.argv[1]) / f"{name}.svg").write_text("\n".join(lines))
