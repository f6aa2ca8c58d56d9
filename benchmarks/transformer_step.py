"""A training step of our transformer against the same model in plain nnx and in PyTorch.

nanoGPT's CPU setting: 4 layers, 4 heads, width 128, context 64, batch 12, 65 tokens, AdamW, no
dropout, float32. Contestants take turns within one run; ratios are of turns side by side.

    python benchmarks/transformer_step.py [--torch PYTHON] [--rounds 40] [--steps 5]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax
import numpy as np
import optax
from peers import nnx_transformer

from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer
from jtrain.state import new_state
from jtrain.step import make_step

SIZES = {"vocab": 65, "context": 64, "layers": 4, "heads": 4, "width": 128}
BATCH = 12


def trainer(sizes, optimizer):
    """A function of tokens that takes a step of ours."""
    model = Transformer(**sizes).build()

    def loss(params, batch, rng):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, rng, True, inputs)
        return next_token(logits, targets, real)

    init = jax.jit(lambda key: new_state(model.init(key)[0], optimizer, key))
    step = jax.jit(make_step(loss, optimizer), donate_argnums=0)
    state = [init(jax.random.key(0))]
    rest = {"row": np.arange(BATCH, dtype=np.int32), "mask": np.ones(BATCH, bool)}

    def take(tokens):
        state[0], metrics = step(state[0], {"tokens": tokens, **rest})
        return metrics["loss"].total

    return take


def clocked(take):
    """`steps -> ms a step` for a function of tokens."""
    data = np.random.default_rng(0).integers(0, SIZES["vocab"], (64, BATCH, SIZES["context"] + 1))
    data = data.astype(np.int32)

    def run(steps):
        start = time.perf_counter()
        for i in range(steps):
            value = take(data[i % len(data)])
        jax.block_until_ready(value)
        return (time.perf_counter() - start) / steps * 1e3

    return run


def torch_process(python, threads):
    """The same in PyTorch, with the line that names its versions; None where it cannot be had."""
    script = os.path.join(os.path.dirname(__file__), "peers", "torch_transformer.py")
    setting = json.dumps({"sizes": SIZES, "batch": BATCH, "threads": threads})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([python, script, setting], **pipes)
    name = child.stdout.readline().strip()
    if not name:
        print(f"SKIPPED PyTorch: {python} cannot import torch. Give --torch PYTHON.")
        return None, ""

    def run(steps):
        child.stdin.write(f"{steps}\n")
        child.stdin.flush()
        return float(child.stdout.readline())

    return run, name


def interval(ratios, draws=2000):
    """The median of the ratios and the 95 % bootstrap interval around it."""
    picks = np.random.default_rng(0).integers(0, len(ratios), (draws, len(ratios)))
    low, high = np.quantile(np.median(np.asarray(ratios)[picks], axis=1), [0.025, 0.975])
    return statistics.median(ratios), low, high


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    asked = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    optimizer = optax.adamw(1e-3, weight_decay=1e-4)
    runs = {
        "jtrain": clocked(trainer(SIZES, optimizer)),
        "plain nnx, jax.jit on dicts": clocked(nnx_transformer.dict_trainer(SIZES, optimizer)),
        "plain nnx, nnx.jit": clocked(nnx_transformer.module_trainer(SIZES, optimizer)),
    }
    torch, versions = torch_process(asked.torch, threads)
    runs |= {"PyTorch, eager": torch} if torch else {}
    print(f"{platform.machine()}, {threads} cores, Python {platform.python_version()}")
    print(f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}; {versions}")

    times = {name: [] for name in runs}
    for run in runs.values():
        run(3)  # compiles
    for _ in range(asked.rounds):
        for name, run in runs.items():
            times[name].append(run(asked.steps))
    print(f"\n{'':30s}{'ms a step':>10s}{'fastest':>9s}   jtrain over it (95 % interval)")
    for name, taken in times.items():
        ratio, low, high = interval(np.divide(times["jtrain"], taken))
        print(
            f"{name:30s}{statistics.median(taken):10.1f}{min(taken):9.1f}"
            f"   {ratio:.3f} ({low:.3f} .. {high:.3f})"
        )


if __name__ == "__main__":
    main()
