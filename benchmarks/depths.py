"""Runs of configs/speedrun.yaml by depth, and the law that their losses follow.

Trains the depths that are not trained yet, in runs/dN, and fits loss = floor + a FLOPs^-b, with the
6 N D FLOPs of N parameters in the blocks and D tokens (Kaplan et al. 2020, section 2.1).

    python benchmarks/depths.py [--depths 2 3 4 5 6 7 8]
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from pairs import machine

from jtrain.io.formatting import format_count

CONFIG = Path(__file__).parent.parent / "configs/speedrun.yaml"


class Run(NamedTuple):
    """A finished run."""

    depth: int
    width: int
    parameters: int  # of the blocks
    tokens: int
    batch: int  # tokens
    lr: float
    loss: float
    minutes: float

    @property
    def flops(self) -> int:
        """Those of the blocks' products, forward and backward."""
        return 6 * self.parameters * self.tokens


def train(depth: int) -> Run:
    """Train a depth, or read it where it is trained."""
    name = f"d{depth}"
    subprocess.run(["jtrain", "run", CONFIG, f"name={name}", f"model.depth={depth}"], check=True)
    shown = subprocess.run(
        ["jtrain", "show", f"runs/{name}/config.yaml", "--json"], check=True, capture_output=True
    )
    values = {key: row["value"] for key, row in json.loads(shown.stdout)["values"].items()}
    read = lambda file: map(json.loads, Path(f"runs/{name}/{file}").read_text().splitlines())
    layers, width = values["model.layers"], values["model.width"]
    return Run(
        depth=depth,
        width=width,
        parameters=12 * layers * width**2,
        tokens=int(values["steps"].split()[0]),
        batch=values["batch"] * values["data.context"],
        lr=values["optimizer.lr"],
        loss=[row["valid/loss"] for row in read("metrics.jsonl") if "valid/loss" in row][-1],
        minutes=list(read("speed.jsonl"))[-1]["trained"] / 60,
    )


def fit(flops: np.ndarray, loss: np.ndarray) -> tuple[float, float, float]:
    """Return floor, factor and exponent of loss = floor + factor flops^-exponent.

    For each floor the rest is a straight line of logarithms; the floor leaves the least error.
    """

    def line(floor: float) -> tuple[float, np.ndarray]:
        found = np.polyfit(np.log(flops), np.log(loss - floor), 1)
        error = loss - floor - np.exp(np.polyval(found, np.log(flops)))
        return float(error @ error), found

    floor = min(np.linspace(0, loss.min() - 1e-3, 2000), key=lambda floor: line(floor)[0])
    slope, log_factor = line(floor)[1]
    return float(floor), float(np.exp(log_factor)), float(-slope)


def main() -> None:
    """Print the table and the law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    runs = [train(depth) for depth in parser.parse_args().depths]
    floor, factor, exponent = fit(
        np.array([run.flops for run in runs], float), np.array([run.loss for run in runs])
    )
    print(
        f"{machine()}\n\n| depth | width | parameters | tokens | a step | rate | FLOPs "
        "| nats | by the law | minutes |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for run in runs:
        law = floor + factor * run.flops**-exponent
        print(
            f"| {run.depth} | {run.width} | {format_count(run.parameters)} "
            f"| {format_count(run.tokens)} | {run.batch:,} | {run.lr:.2g} | {run.flops:.2g} "
            f"| {run.loss:.3f} | {law:.3f} | {run.minutes:.1f} |"
        )
    print(f"\nloss = {floor:.2f} + {factor:.3g} FLOPs^-{exponent:.3f}")


if __name__ == "__main__":
    main()
