"""Cost of a step of an nnx model in jtrain's loop, against the idiom of `nnx.jit`.

Ours is the loop of `jtrain run` with all its hooks over plain dicts, made by `from_nnx`. The idiom
is the one of flax's own documentation: an `nnx.Optimizer`, `nnx.value_and_grad` inside `nnx.jit`,
module and optimizer passed to each call; its loss is read eight steps late. Both train the tiny
MLP, 784-32-10 on 32 rows, by AdamW. With `scan` 50 of our steps are one call.

    python benchmarks/nnx_step.py [--rounds 30] [mlp | scan ...]
"""

import argparse
import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from loop_overhead import Ours, config, images
from pairs import machine, ratio, table, take_turns

import jtrain as jt
from jtrain.core.placement import Placement
from jtrain.data import Arrays, Shuffled
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.adapters.nnx import from_nnx

ROWS = 32


class Net(nnx.Module):
    """784-32-10."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(784, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of each row."""
        return self.down(nnx.relu(self.up(x)))


@jt.configclass
class Mlp(jt.RunConfig):
    """The tiny MLP as a run."""

    def build(self, place: Placement) -> jt.Experiment:
        """Random images."""
        model = from_nnx(Net)

        def loss(params, batch, rng):
            logits, _ = model.apply(params, {}, batch["image"], train=rng is not None)
            return cross_entropy(logits, batch["label"], batch["mask"])[0]

        return jt.Experiment(
            init=model.init,
            loss=loss,
            train=Shuffled(Arrays(**images()), size=self.batch),
            optimizer=optax.adamw(1e-3),
        )


class Idiom:
    """Steps of `nnx.jit`, some at each turn."""

    def __init__(self, steps: int):
        self.model = Net(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(1e-3), wrt=nnx.Param)
        self.data, self.order = images(), np.random.default_rng(1).permutation(10_000)
        self.steps, self.done = steps, 0

        def loss(model: Net, batch: dict[str, Any]) -> jax.Array:
            logits = model(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        @nnx.jit
        def take(model: Net, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> jax.Array:
            value, grads = nnx.value_and_grad(loss)(model, batch)
            optimizer.update(model, grads)
            return value

        self.take = take

    def __call__(self) -> float:
        """Return the microseconds a step of this turn."""
        began, losses = time.perf_counter(), collections.deque()
        for step in range(self.done, self.done + self.steps):
            rows = np.take(self.order, range(ROWS * step, ROWS * step + ROWS), mode="wrap")
            batch = {name: array[rows] for name, array in self.data.items()}
            losses.append(self.take(self.model, self.optimizer, batch))
            if len(losses) > 8:
                losses.popleft().block_until_ready()
        self.done += self.steps
        jax.block_until_ready(nnx.state(self.model))
        return (time.perf_counter() - began) / self.steps * 1e6


def contestants(steps_per_call: int, stack: contextlib.ExitStack) -> dict[str, Callable]:
    """Return the idiom and ours."""
    return {
        "nnx.jit": Idiom(500),
        "jtrain": Ours(config(Mlp, ROWS, steps_per_call), 1000, stack),
    }


CASES = {"mlp": 1, "scan": 50}  # steps in a call of ours


def main() -> None:
    """Print a table a case."""
    parser = argparse.ArgumentParser(description="An nnx model in jtrain against nnx.jit.")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    print(machine())
    for case in given.cases or CASES:
        with contextlib.ExitStack() as stack:
            times = take_turns(contestants(CASES[case], stack), given.rounds)
        print(f"\n{case}, {CASES[case]} steps a call:\n\n{table(times, 'us a step', 'nnx.jit')}")
        print(f"\nratio: {ratio(times['jtrain'], times['nnx.jit'])}")


if __name__ == "__main__":
    main()
