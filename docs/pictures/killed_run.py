"""The moving picture of the README: a run that is killed twice, over the same run left alone.

    python3 docs/pictures/killed_run.py FOLDER docs/pictures/killed_run.svg

Trains configs/shakespeare.yaml twice in FOLDER, the second time with two kills (ten minutes on two
cores; runs that are there are not trained again), checks that all numbers are equal, and draws.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "shakespeare.yaml"
TYPED = "jtrain run configs/shakespeare.yaml"
OPTIONS = ["log.every=5", "checkpoint.every=100"]
KILLS = (330, 640)  # steps at which the run is killed, or soon after
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 56, 24, 118, 36  # pixels
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SECONDS = {"train": 7.0, "killed": 1.4, "end": 3.0}  # for all steps; after a kill; at the end


def train(folder: Path, name: str, kills: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Train a run, killed at each of `kills`; return (killed at, resumed from) of each."""
    metrics, found = folder / "runs" / name / "metrics.jsonl", []
    command = [sys.executable, "-m", "jtrain", "run", str(CONFIG), f"name={name}", *OPTIONS]
    for at in kills:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        while (step := newest_step(metrics)) < at:
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        saved = [int(x) for x in os.listdir(metrics.parent / "checkpoints") if x.isdigit()]
        found.append((step, max(saved)))
    subprocess.run(command, cwd=folder, check=True)
    return found


def newest_step(metrics: Path) -> int:
    """Return the last step that a run has written; 0 before the first."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    try:
        return json.loads(lines[-1])["step"] if lines else 0
    except ValueError:  # a line that is being written
        return 0


def read_losses(folder: Path, name: str) -> dict[int, float]:
    """Return the loss of each logged step, of training alone."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "grad_norm" in row}


def animate(name: str, points: list[tuple[float, float]], discrete: bool = False) -> str:
    """Return the animation of an attribute through (second, value), again and again."""
    total = points[-1][0]
    times = ";".join(f"{second / total:.4f}" for second, _ in points)
    values = ";".join(f"{value:g}" for _, value in points)
    mode = ' calcMode="discrete"' if discrete else ""
    return (
        f'<animate attributeName="{name}" dur="{total:g}s" repeatCount="indefinite"{mode} '
        f'keyTimes="{times}" values="{values}"/>'
    )


def draw(losses: dict[int, float], kills: list[tuple[int, int]]) -> str:
    """Return the SVG."""
    last, low, high = max(losses), min(losses.values()), max(losses.values())
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / last
    y = lambda loss: TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)
    curve = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in losses.items())
    second, begun, heads, lines = 0.0, 0, [(0.0, 0.0)], []
    parts = []  # (the life's first second, its text)
    for killed, saved in [*kills, (last, last)]:
        resumed = f"  # resumes at step {begun}" if begun else ""
        parts.append((second, f"$ {TYPED}{resumed}"))
        second += SECONDS["train"] * (killed - begun) / last
        heads.append((second, x(killed) - LEFT))
        if killed != last:
            lines.append((second, killed))
            second += SECONDS["killed"]
            heads += [(second, x(killed) - LEFT), (second, x(saved) - LEFT)]
        begun = saved
    parts.append((second, "every number is that of a run left alone (grey), bit for bit"))
    total = second + SECONDS["end"]
    heads.append((total, x(last) - LEFT))
    shown = lambda start: animate("opacity", [(0, 0), (start, 1), (total, 1)], discrete=True)
    texts = []
    for row, (start, text) in enumerate(parts):
        color = "#7ee787" if text.startswith("$") else "#e6edf3"
        moving = shown(start) if start else ""
        texts.append(f'<text x="20" y="{30 + 22 * row}" fill="{color}">{text}{moving}</text>')
    for start, killed in lines:
        texts.append(
            f'<g fill="#ff7b72" stroke="none"><text x="{x(killed) + 6:.0f}" y="{TOP + 22}">'
            f'kill -9</text><rect x="{x(killed):.1f}" y="{TOP}" width="1.5" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>{shown(start)}</g>'
        )
    axis = [
        f'<text x="{x(step):.0f}" y="{HEIGHT - 12}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, last // 5)
    ]
    axis += [
        f'<text x="20" y="{y(loss) + 4:.0f}">{loss:.1f}</text>' for loss in (2.0, 2.5, 3.0, 3.5)
    ]
    axis.append(f'<text x="{WIDTH - RIGHT}" y="{TOP - 22}" text-anchor="end">training loss</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}">',
            "<title>Loss of a run that was killed twice, over that of a run left alone</title>",
            '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
            f'<g style="font: 13px {FONT}" fill="#8b949e">',
            *axis,
            f'<polyline points="{curve}" fill="none" stroke="#484f58" stroke-width="5"/>',
            f'<clipPath id="done"><rect x="{LEFT}" y="0" height="{HEIGHT}" '
            f'width="{WIDTH - LEFT}">{animate("width", heads)}</rect></clipPath>',
            f'<polyline points="{curve}" fill="none" stroke="#7ee787" stroke-width="1.8" '
            'clip-path="url(#done)"/>',
            *texts,
            "</g>",
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    folder, target = map(Path, sys.argv[1:])
    folder.mkdir(exist_ok=True)
    if not (folder / "kills.json").exists():
        train(folder, "whole")
        (folder / "kills.json").write_text(json.dumps(train(folder, "killed", KILLS)))
    alone, killed = read_losses(folder, "whole"), read_losses(folder, "killed")
    assert alone == killed, "the numbers differ"
    target.write_text(draw(killed, json.loads((folder / "kills.json").read_text())))
