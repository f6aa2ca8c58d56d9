"""A training step of our transformer against the same model in plain nnx and in PyTorch.

nanoGPT's CPU setting: 4 layers, 4 heads, width 128, context 64, batch 12, 65 tokens, AdamW, no
dropout, float32. Contestants take turns within one run; ratios are of turns side by side.

    python benchmarks/transformer_step.py [--torch PYTHON] [--rounds 40] [--steps 5] [--keep-memory]
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from pairs import machine, ratio, take_turns
from peers import nnx_transformer

from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer

SIZES: dict[str, Any] = {"vocab": 65, "context": 64, "layers": 4, "heads": 4, "width": 128}
BATCH = 12
TARGET = 0.85  # of the same model plainly written in nnx


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--keep-memory", action="store_true", help="see keep_memory()")
    asked = parser.parse_args()
    if asked.keep_memory:
        keep_memory()
    optimizer = optax.adamw(1e-3, weight_decay=1e-4)
    trainers = {
        "jtrain": trainer(optimizer),
        "plain nnx, jax.jit over dicts": nnx_transformer.dict_trainer(SIZES, optimizer),
        "plain nnx, nnx.jit": nnx_transformer.module_trainer(SIZES, optimizer),
    }
    runs = {name: clocked(take, asked.steps) for name, take in trainers.items()}
    versions, torch = torch_process(asked.torch, asked.steps)
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


def clocked(take: Callable, steps: int) -> Callable[[], float]:
    """Return a function that measures the milliseconds of one of `steps` steps."""
    draw = np.random.default_rng(0)
    data = draw.integers(0, SIZES["vocab"], (steps, BATCH, SIZES["context"] + 1)).astype(np.int32)

    def run():
        start = time.perf_counter()
        jax.block_until_ready([take(tokens) for tokens in data])
        return (time.perf_counter() - start) / steps * 1e3

    return run


def torch_process(python: str, steps: int) -> tuple[str, Callable[[], float] | None]:
    """Return PyTorch's versions and the same step in it; None, and why, if unavailable."""
    script = str(Path(__file__).parent / "peers" / "torch_transformer.py")
    threads = len(os.sched_getaffinity(0))
    setting = json.dumps({"sizes": SIZES, "batch": BATCH, "threads": threads})
    pipe = subprocess.PIPE
    child = subprocess.Popen([python, script, setting], stdin=pipe, stdout=pipe, text=True)
    assert child.stdin
    assert child.stdout
    asks, answers = child.stdin, child.stdout
    versions = answers.readline().strip()
    if not versions:
        return f"PyTorch SKIPPED: {python} has no torch, say --torch PYTHON", None

    def run():
        asks.write(f"{steps}\n")
        asks.flush()
        return float(answers.readline())

    return versions, run


def keep_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system.

    XLA:CPU asks for a step's temporaries anew at every step. Above 32 MB glibc maps them afresh
    each time: 10,700 page faults a step of this model, a quarter of its time.
    Source: mallopt(3); -4 is M_MMAP_MAX, -1 M_TRIM_THRESHOLD.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-4, 0)
    mallopt(-1, 2**31 - 1)


if __name__ == "__main__":
    main()
