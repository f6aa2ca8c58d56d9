"""A training step of our CNN against the same network in plain flax and in PyTorch.

Two 3x3 convolutions (32 and 64 outputs), each with ReLU and a 2x2 max pool, and a linear map to 10
classes, on 128 images of 28 x 28 x 1; Adam, float32, no dropout. Contestants take turns within one
run; ratios are of turns side by side. Where the CPU has several cores, our step also runs with its
rows split over as many devices (`parallel.devices`), the way of jtrain to use them all.

    python benchmarks/cnn_step.py [--torch PYTHON] [--rounds 40] [--steps 2] [--cpu]
"""

import argparse
import inspect
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pairs import machine, ratio, table, take_turns
from peers import nnx_cnn
from torch_process import torch_process

from jtrain.core.model import Model
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.adapters.libraries import from_linen
from jtrain.models.classifiers import CNN
from jtrain.parallel import Mirrored
from jtrain.train.runtime import reuse_memory

BATCH = 128
TARGET = 0.75  # of the same network plainly written in flax


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2, help="steps a turn")
    parser.add_argument("--cpu", action="store_true", help="processor time in place of time")
    asked = parser.parse_args()
    reuse_memory()  # as every run does
    devices = 1 if asked.cpu else jax.device_count()
    optimizer = optax.adam(1e-3)
    plain = "plain nnx, jax.jit over dicts"
    split = f"jtrain, {devices} devices"
    linen = from_linen(Linen(), jnp.zeros((1, 28, 28, 1)))
    trainers = {
        "jtrain": trainer(optimizer),
        "jtrain, the network in linen": trainer(optimizer, model=linen),
        "the same, XLA's pool": trainer(
            optimizer, model=linen._replace(apply=inspect.unwrap(linen.apply))
        ),
        **({split: trainer(optimizer, devices)} if devices > 1 else {}),
        plain: nnx_cnn.dict_trainer(optimizer),
        "plain nnx, nnx.jit": nnx_cnn.module_trainer(optimizer),
    }
    runs = {name: clocked(take, asked.steps, asked.cpu) for name, take in trainers.items()}
    versions, torch = torch_process(
        asked.torch, "torch_cnn.py", {"batch": BATCH}, steps=asked.steps, cpu=asked.cpu
    )
    runs |= {"PyTorch, eager": torch} if torch else {}
    print(f"{machine()}; {versions}\n")
    times = take_turns(runs, asked.rounds, warmup=2)
    print(table(times, "ms a step", plain))
    over = ratio(times["jtrain"], times[plain])
    for ours in ("jtrain", split):
        for name in times.keys() - {"jtrain", split} if ours in times else ():
            print(f"{ours} over {name}: {ratio(times[ours], times[name])}")
    print(f"\ntarget {TARGET}: {'met' if over.median <= TARGET else 'missed'}")


class Linen(nn.Module):
    """The network as linen's documentation would write it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of each row."""
        for channels in (32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


def trainer(
    optimizer: optax.GradientTransformation, devices: int = 1, model: Model | None = None
) -> Callable:
    """Return a function of images and labels that takes a step of jtrain on so many devices."""
    strategy = Mirrored(devices=devices).build()
    model = model or CNN(image=(28, 28, 1), classes=10).build(strategy.placement)

    def loss(params, batch, rng):
        logits, _ = model.apply(params, {}, batch["image"], rng=rng, train=True)
        return cross_entropy(logits, batch["label"], batch["mask"])

    make = lambda key: new_state(model.init(key)[0], optimizer, key)
    like = jax.eval_shape(make, jax.random.key(0))
    state = [jax.jit(make, out_shardings=strategy.shardings(like, model.dims))(jax.random.key(0))]
    batch = {
        "image": np.zeros((BATCH, 28, 28, 1), np.float32),
        "label": np.zeros(BATCH, np.int32),
        "row": np.arange(BATCH, dtype=np.int32),
        "mask": np.ones(BATCH, bool),
    }
    whole = strategy.gradient_sharding(like.params, model.dims)
    step = make_step(loss, optimizer, psum=strategy.psum, sharding=whole)
    program = strategy.compile(step, state[0], strategy.place(batch), returns_state=True)

    def take(image, label):
        placed = strategy.place({**batch, "image": image, "label": label})
        state[0], metrics = program(state[0], placed)
        return metrics["loss"].total

    return take


def clocked(take: Callable, steps: int, cpu: bool) -> Callable[[], float]:
    """Return a function that measures the milliseconds of one of `steps` steps."""
    draw = np.random.default_rng(0)
    images = draw.standard_normal((steps, BATCH, 28, 28, 1)).astype(np.float32)
    labels = draw.integers(0, 10, (steps, BATCH)).astype(np.int32)

    clock = time.process_time if cpu else time.perf_counter

    def run():
        start = clock()
        jax.block_until_ready([take(*batch) for batch in zip(images, labels, strict=True)])
        return (clock() - start) / steps * 1e3

    return run


if __name__ == "__main__":
    main()
