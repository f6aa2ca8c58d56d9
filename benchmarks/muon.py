"""Steps that Muon needs to reach the final validation loss of AdamW.

The character transformer of configs/shakespeare.yaml, but for optimizer and number of steps.
Each optimizer first takes the best of a few learning rates (seed 0), then all seeds. The schedule
(warmup, then a cosine to a tenth over the whole run) is as long as the run, so for each number of
steps Muon trains anew.

    python benchmarks/muon.py [--steps 300] [--seeds 3] [--shares 0.4 0.6 0.8]
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pairs import machine

import jtrain as jt
from jtrain.config.resolve import resolve

ROOT = Path(__file__).parent.parent
RATES = {"adamw": (4e-3, 8e-3, 1.6e-2), "muon": (8e-3, 1.6e-2, 3.2e-2)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of AdamW's runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.6, 0.8])
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    print(
        f"{machine()}\n\n| optimizer | learning rate | validation at step {asked.steps}, seed 0 |"
    )
    print("|---|---:|---:|")
    best = {}
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for kind, rates in RATES.items():
            losses = {rate: reached(kind, rate, asked.steps, 0) for rate in rates}
            for rate, loss in losses.items():
                print(f"| {kind} | {rate:g} | {loss:.4f} |", flush=True)
            best[kind] = min(losses, key=losses.__getitem__)
        over = range(asked.seeds)
        goal = [reached("adamw", best["adamw"], asked.steps, seed) for seed in over]
        print(f"\nAdamW, {asked.steps} steps, {asked.seeds} seeds: {told(goal)}\n")
        print("| Muon's steps | of AdamW's | validation |\n|---:|---:|---:|")
        for share in asked.shares:
            steps = round(asked.steps * share)
            found = [reached("muon", best["muon"], steps, seed) for seed in over]
            met = " reached" if statistics.mean(found) <= statistics.mean(goal) else ""
            print(f"| {steps} | {share:g} | {told(found)}{met} |", flush=True)


def reached(kind: str, rate: float, steps: int, seed: int) -> float:
    """Return the loss of the whole validation set after a run."""
    settings = [
        f"name={kind}-{rate:g}-{steps}-{seed}", f"steps={steps}", f"seed={seed}",
        f"optimizer.kind={kind}", f"optimizer.lr={rate}", "optimizer.weight_decay=0.1",
        "evaluate.every=0", "evaluate.batch=512", "checkpoint.every=0", "checkpoint.best=''",
        "parallel={kind: single}",
    ]  # fmt: skip
    with open(os.devnull, "w") as nowhere:
        config = resolve(ROOT / "configs" / "shakespeare.yaml", settings).config
        return jt.run(config, screen=nowhere).results[steps]["loss"]


def told(losses: Sequence[float]) -> str:
    """Return the mean and the spread."""
    return f"{statistics.mean(losses):.4f} ({min(losses):.4f} .. {max(losses):.4f})"


if __name__ == "__main__":
    main()
