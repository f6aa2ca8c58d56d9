"""A training step of our transformer against the same model in plain nnx and in PyTorch.

nanoGPT's CPU setting: 4 layers, 4 heads, width 128, context 64, batch 12, 65 tokens, AdamW, no
dropout, float32. Contestants take turns within one run; ratios are of turns side by side.

    python benchmarks/transformer_step.py [--torch PYTHON] [--rounds 40] [--steps 5] [--cpu]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from pairs import machine, ratio, take_turns
from peers import nnx_transformer
from torch_process import torch_process

from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer
from jtrain.train.runtime import reuse_memory

SIZES: dict[str, Any] = {"vocab": 65, "context": 64, "layers": 4, "heads": 4, "width": 128}
BATCH = 12
TARGET = 0.85  # of the same model plainly written in nnx


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--cpu", action="store_true", help="processor time in place of time")
    asked = parser.parse_args()
    reuse_memory()  # as every run does
    optimizer = optax.adamw(1e-3, weight_decay=1e-4)
    trainers = {
        "jtrain": trainer(optimizer),
        "plain nnx, jax.jit over dicts": nnx_transformer.dict_trainer(SIZES, optimizer),
        "plain nnx, nnx.jit": nnx_transformer.module_trainer(SIZES, optimizer),
    }
    runs = {name: clocked(take, asked.steps, asked.cpu) for name, take in trainers.items()}
    versions, torch = torch_process(
        asked.torch,
        "torch_transformer.py",
        {"sizes": SIZES, "batch": BATCH},
        steps=asked.steps,
        cpu=asked.cpu,
    )
    runs |= {"PyTorch, eager": torch} if torch else {}
    print(f"{machine()}; {versions}\n")
    times = take_turns(runs, asked.rounds, warmup=2)
    print(f"{'':30s}{'ms a step':>10s}{'fastest':>9s}   jtrain over it (95 % interval)")
    for name, taken in times.items():
        over = ratio(times["jtrain"], taken)
        print(f"{name:30s}{np.median(taken):10.1f}{min(taken):9.1f}   {over}")
    over = ratio(times["jtrain"], times["plain nnx, jax.jit over dicts"])
    print(f"\ntarget {TARGET}: {'met' if over.median <= TARGET else 'missed'}")


def trainer(optimizer: optax.GradientTransformation) -> Callable:
    """Return a function of tokens that takes a step of jtrain."""
    model = Transformer(**SIZES).build()

    def loss(params, batch, rng):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, rng=rng, train=True)
        return next_token(logits, targets, real)

    init = jax.jit(lambda key: new_state(model.init(key)[0], optimizer, key))
    step = jax.jit(make_step(loss, optimizer), donate_argnums=0)
    state = [init(jax.random.key(0))]
    rest = {"row": np.arange(BATCH, dtype=np.int32), "mask": np.ones(BATCH, bool)}

    def take(tokens):
        state[0], metrics = step(state[0], {"tokens": tokens, **rest})
        return metrics["loss"].total

    return take


def clocked(take: Callable, steps: int, cpu: bool) -> Callable[[], float]:
    """Return a function that measures the milliseconds of one of `steps` steps."""
    draw = np.random.default_rng(0)
    data = draw.integers(0, SIZES["vocab"], (steps, BATCH, SIZES["context"] + 1)).astype(np.int32)

    clock = time.process_time if cpu else time.perf_counter

    def run():
        start = clock()
        jax.block_until_ready([take(tokens) for tokens in data])
        return (clock() - start) / steps * 1e3

    return run


if __name__ == "__main__":
    main()
