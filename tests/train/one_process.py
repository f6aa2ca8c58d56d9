"""One of several processes with four devices each: PORT INDEX COUNT RESULTS. Not a test itself.

Takes a few steps under each strategy, evaluates, and writes what came out and which rows it read.
"""

import os
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import optax
from layouts import start, strategy
from tiny_language import batches, loss_of

from jtrain.core.evaluate import evaluate, make_evaluate
from jtrain.core.step import make_step, scan_steps
from jtrain.data.batches.by_step import InOrder, Shuffled
from jtrain.data.sources.arrays import Arrays
from jtrain.errors import ShardingError
from jtrain.parallel import Mirrored, Single, Strategy

NAMES = ["mirrored jit", "mirrored shard_map", "fsdp"]
ROWS, SIZE, STEPS = 84, 32, 4  # the third batch of an epoch holds 20 rows


class Watched(Arrays):
    """Arrays that remember which of their rows were read."""

    def __init__(self, **arrays: np.ndarray):
        super().__init__(**arrays)
        self.read: list[int] = []

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.read += indices.tolist()
        return super().__getitem__(indices)


def sequences() -> Watched:
    whole = next(batches("ragged", 1, size=ROWS))
    return Watched(**{name: whole[name] for name in ("tokens", "length", "weight")})


def walk(where: Strategy, microbatches: int = 1, index: int = 0, count: int = 1) -> dict:
    """Return losses, gathered parameters, an evaluation and the rows that this process read."""
    source, optimizer = sequences(), optax.sgd(0.5)
    train = Shuffled(source, size=SIZE, seed=3, end="pad").shard(index, count)
    loss, state = loss_of("terms", True), start(where, optimizer)
    step = make_step(
        loss, optimizer, microbatches=microbatches, psum=where.psum, ragged=train.ragged
    )
    placed = [where.place(train[number]) for number in range(STEPS)]
    read = source.read
    one = where.compile(step, state, placed[0], keeps=True)
    losses = []
    for batch in placed:
        state, metrics = one(state, batch)
        losses.append(metrics["loss"].value())
    whole = jax.jit(lambda tree: tree, out_shardings=where.shardings(jax.numpy.int32(0)))
    params = jax.device_get(whole(state.params))
    valid = InOrder(sequences(), size=SIZE).shard(index, count)
    weights = state.params, state.extra
    sets = [where.place(valid[number]) for number in range(len(valid))]
    program = make_evaluate(loss, psum=where.psum, ragged=valid.ragged)
    numbers = evaluate(where.compile(program, weights, sets[0]), weights, sets)
    leaves = {f"params{i}": leaf for i, leaf in enumerate(jax.tree.leaves(params))}
    return {"losses": np.array(losses), "read": np.array(read), **leaves, **numbers}


def stacked(where: Strategy, index: int, count: int) -> np.ndarray:
    """Return the losses of two steps in one call."""
    train = Shuffled(sequences(), size=SIZE, seed=3, end="pad").shard(index, count)
    both = {name: np.stack([x, train[1][name]]) for name, x in train[0].items()}
    state, batch = start(where, optax.sgd(0.5)), where.place(both, stacked=True)
    step = scan_steps(
        make_step(loss_of("terms", True), optax.sgd(0.5), psum=where.psum, ragged=True)
    )
    _, metrics = where.compile(step, state, batch, stacked=True, keeps=True)(state, batch)
    return metrics["loss"].value()


def refused() -> str:
    """Return the errors of single-process strategies in several processes."""
    said = []
    for parallel in (Single(), Mirrored(impl="pmap")):
        try:
            parallel.build()
        except ShardingError as error:
            said.append(str(error))
    return "\n".join(said)


def main(port: str, index: int, count: int, results: str) -> None:
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, count, index, coordinator_bind_address=where)
    assert (jax.device_count(), jax.local_device_count()) == (4 * count, 4)
    out = {"stacked": stacked(strategy("mirrored jit", 4), index, count), "refused": refused()}
    for name in NAMES:
        # Devices are counted in each process.
        walked = walk(strategy(name, 4), 2, index, count)
        out |= {f"{name}/{what}": value for what, value in walked.items()}
    np.savez(results, **out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
