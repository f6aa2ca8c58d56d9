"""Overhead of jtrain's loop over a loop written by hand around `jax.jit`.

Ours is the loop of `jtrain run` with all its hooks (log, metrics, speed, guard, signals) and the
digest of each batch; a line of log, with all metrics, costs about a millisecond and comes every
1000 steps. By hand: the same loss and optimizer jitted, batches by numpy's fancy indexing, the loss
read eight steps late.

    python benchmarks/loop_overhead.py [--rounds 30] [mlp | transformer | scan ...]
"""

import argparse
import collections
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pairs import machine, table, take_turns

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.config.top import CheckpointConfig, LogConfig
from jtrain.core.placement import Placement
from jtrain.data import Arrays, Shuffled
from jtrain.data.text.token_rows import Windows
from jtrain.io.log import RunLog
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer
from jtrain.optim.adam import AdamW
from jtrain.parallel import Single
from jtrain.train.hooks.signals import Signals
from jtrain.train.program import set_up
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir
from jtrain.train.run_store import DirectoryStore
from jtrain.train.trainer import Trainer

STEPS = 10**8  # the run never ends; a turn is a part of it


def mlp_params(key: jax.Array) -> dict[str, jax.Array]:
    """784-32-10."""
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (784, 32)) * 0.03,
        "up_bias": jnp.zeros(32),
        "down": jax.random.normal(down, (32, 10)) * 0.1,
        "down_bias": jnp.zeros(10),
    }


def mlp_nats(params: Any, batch: Any) -> jax.Array:
    """Return nats a row."""
    hidden = jax.nn.relu(batch["image"] @ params["up"] + params["up_bias"])
    logits = hidden @ params["down"] + params["down_bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def images(rows: int = 10_000) -> dict[str, np.ndarray]:
    """Random images of 784 numbers with a label."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, rows).astype(np.int32)
    return {"image": rng.random((rows, 784), np.float32), "label": labels}


def characters() -> np.ndarray:
    """Return as many random characters as tiny Shakespeare has."""
    return np.random.default_rng(0).integers(0, 65, 1_000_000).astype(np.int32)


@jt.configclass
class Mlp(jt.RunConfig):
    """The tiny MLP, whose step costs next to nothing."""

    def build(self, place: Placement) -> jt.Experiment:
        """Random images."""
        return jt.Experiment(
            init=lambda key: (mlp_params(key), ()),
            loss=lambda params, batch, rng: jt.Mean.of(mlp_nats(params, batch), batch["mask"]),
            train=Shuffled(Arrays(**images()), size=self.batch),
            optimizer=optax.adamw(1e-3),
        )


@jt.configclass
class Characters(jt.RunConfig):
    """Build the character transformer, 12 rows of 64 characters a step."""

    def build(self, place: Placement) -> jt.Experiment:
        """Random characters."""
        model = transformer()

        def loss(params, batch, rng):
            inputs, targets, real = inputs_and_targets(batch)
            logits, _ = model.apply(params, {}, inputs, train=rng is not None)
            return next_token(logits, targets, real)[0]

        return jt.Experiment(
            init=model.init,
            loss=loss,
            train=Shuffled(Windows(characters(), context=64), size=self.batch),
            optimizer=optax.adamw(1e-3),
            tokens=64,
        )


def transformer() -> jt.Model:
    """4 layers, 4 heads, width 128, context 64."""
    return Transformer(vocab=65, context=64, layers=4, heads=4, width=128).build()


class Ours:
    """A run of jtrain, a part of it at each turn."""

    def __init__(self, config: jt.RunConfig, steps: int, stack: contextlib.ExitStack):
        program = set_up(config)
        directory = RunDir(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        directory.begin(config)
        kept = stack.enter_context(CheckpointManager(directory.checkpoints))
        store = DirectoryStore(config, directory, kept, None, "")
        signals = stack.enter_context(Signals())
        log = stack.enter_context(RunLog(io.StringIO()))
        log.open(directory.log)
        resume = ResumePoint(start=None, batches=program.batches())
        self.step, self.state = program.compile_step(), program.initial_state()
        given = program, resume, self.state, store, signals, log
        self.trainer = stack.enter_context(Trainer(*given))
        self.steps, self.done = steps, 0

    def __call__(self) -> float:
        """Return the microseconds a step of this turn."""
        trainer, began = self.trainer, time.perf_counter()
        ended = jt.train_loop(
            self.step,
            self.state,
            trainer.attempt.signals.through(trainer.feed),
            start=self.done,
            stop=self.done + self.steps,
            **trainer.loop_options(),
        )
        self.state, self.done = jax.block_until_ready(ended.state), ended.step
        return (time.perf_counter() - began) / self.steps * 1e6


class ByHand:
    """`take(state, batch) -> (state, loss)` in a loop of its own, `each` steps a call."""

    def __init__(self, take: Callable, state: Any, read: Callable, steps: int, each: int = 1):
        self.take, self.state, self.read = jax.jit(take, donate_argnums=0), state, read
        self.steps, self.each, self.done = steps, each, 0

    def __call__(self) -> float:
        """Return the microseconds a step of this turn."""
        began, losses = time.perf_counter(), collections.deque()
        for _ in range(self.steps // self.each):
            self.state, loss = self.take(self.state, self.read(self.done))
            self.done += self.each
            losses.append(loss)
            if len(losses) > 8:
                losses.popleft().block_until_ready()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began) / self.steps * 1e6


def written_by_hand(loss: Callable, params: Any) -> tuple[Callable, Any]:
    """Return the step and the state of a loop by hand."""
    optimizer = optax.adamw(1e-3)

    def take(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return take, (params, optimizer.init(params))


def config(
    kind: type[jt.RunConfig], batch: int, steps_per_call: int | Literal["auto"] = 1
) -> jt.RunConfig:
    """Return the config of a run on one device."""
    return kind(
        experiment="benchmark",
        name="benchmark",
        steps=STEPS,
        batch=batch,
        steps_per_call=steps_per_call,
        optimizer=AdamW(lr=1e-3),
        parallel=Single(),
        checkpoint=CheckpointConfig(every=0),
        log=LogConfig(every=1000),  # steps of 0.1 ms: ten lines a second
    )


def mlp(stack: contextlib.ExitStack) -> dict[str, Callable[[], float]]:
    """Build the tiny MLP, 32 rows a step."""
    data, order = images(), np.random.default_rng(1).permutation(10_000)

    def read(step):
        taken = np.take(order, range(32 * step, 32 * step + 32), mode="wrap")
        return {name: array[taken] for name, array in data.items()}

    loss = lambda params, batch: mlp_nats(params, batch).mean()
    take, state = written_by_hand(loss, mlp_params(jax.random.key(0)))
    return {
        "by hand": ByHand(take, state, read, 1000),
        "jtrain": Ours(config(Mlp, 32), 1000, stack),
        "jtrain, auto": Ours(config(Mlp, 32, "auto"), 1000, stack),
    }


def scan(stack: contextlib.ExitStack) -> dict[str, Callable[[], float]]:
    """Build the tiny MLP, 50 steps of 32 rows a call."""
    data, order = images(), np.random.default_rng(1).permutation(10_000)

    def read(step):
        taken = np.take(order, range(32 * step, 32 * step + 1600), mode="wrap")
        return {n: a[taken].reshape(50, 32, *a.shape[1:]) for n, a in data.items()}

    loss = lambda params, batch: mlp_nats(params, batch).mean()
    take, state = written_by_hand(loss, mlp_params(jax.random.key(0)))
    scanned = lambda state, batches: jax.lax.scan(take, state, batches)
    return {
        "by hand": ByHand(scanned, state, read, 2000, 50),
        "jtrain": Ours(config(Mlp, 32, steps_per_call=50), 2000, stack),
    }


def char(stack: contextlib.ExitStack) -> dict[str, Callable[[], float]]:
    """Build the character transformer, 12 rows of 64 characters a step."""
    model, tokens = transformer(), characters()
    order = np.random.default_rng(1).permutation(len(tokens) - 64)

    def read(step):
        taken = np.take(order, range(12 * step, 12 * step + 12), mode="wrap")
        return tokens[taken[:, None] + np.arange(65)]

    def loss(params, batch):
        logits, _ = model.apply(params, {}, batch[:, :-1], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    take, state = written_by_hand(loss, jax.jit(model.init)(jax.random.key(0))[0])
    return {
        "by hand": ByHand(take, state, read, 30),
        "jtrain": Ours(config(Characters, 12), 30, stack),
    }


CASES = {"mlp": mlp, "scan": scan, "transformer": char}


def main() -> None:
    """Print a table a case."""
    parser = argparse.ArgumentParser(description="What jtrain's loop adds to one by hand.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"{unknown[0]} is not a case; there is {', '.join(CASES)}")
    print(machine())
    for case in given.cases or CASES:
        with contextlib.ExitStack() as stack:
            times = take_turns(CASES[case](stack), given.rounds)
        print(f"\n{case}: {CASES[case].__doc__}\n\n{table(times, 'us a step', 'by hand')}\n")
        for name in times.keys() - {"by hand"}:
            added = [a - b for a, b in zip(times[name], times["by hand"], strict=True)]
            print(f"{name}: {statistics.median(added):.1f} us a step more (median of pairs)")


if __name__ == "__main__":
    main()
