"""Communication of workers: bytes, and the loss after as many rows, in each mode.

    python benchmarks/server_modes.py communication --only diloco

A character transformer of 28,512 parameters (2 blocks of width 32) on 32 characters of the plays of
Shakespeare. All modes begin from the same model, which one device has trained for 1,000 steps at a
constant rate, and take 3,000 steps of 64 rows over four workers, each mode at the best rate that
benchmarks/server_simulation.py has found for it; otherwise the values of configs/shakespeare.yaml.
The bytes are those of the frames that the four workers sent and received, without the copies of
their own states. The workers are threads of one process.
"""

import dataclasses
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from server_threads import thread_cluster

from jtrain.config.resolve import resolve
from jtrain.core.loop import train_loop
from jtrain.core.state import TrainState
from jtrain.core.types import Params
from jtrain.optim.schedules import Constant
from jtrain.parallel import Single
from jtrain.parallel.strategies.server_modes import E3M0, BFloat16, Int4, Int8, TopK
from jtrain.server.codec import make_codec
from jtrain.server.plan import Plan
from jtrain.server.server_loop import take_steps
from jtrain.train.initial_state import makers
from jtrain.train.program import Program, set_up


class Row(NamedTuple):
    """Values under `parallel`, and others, of a run."""

    parallel: str
    others: tuple[str, ...] = ()


SERVER = "parallel={kind: server, workers: 4, shards: 1, snapshot_every: 100000, %s}"
ROWS = {
    "sync": Row("mode: {kind: sync}", ("optimizer.lr=8e-3",)),
    "diloco, H = 50": Row(
        "compress: {kind: bf16}, mode: {kind: diloco, inner_steps: 50}", ("optimizer.lr=4e-3",)
    ),
    "streaming, H = 46, int4": Row(
        "pulls: int8, compress: {kind: int4, block: 64}, "
        "mode: {kind: streaming_diloco, inner_steps: 46, fragments: 2, alpha: 0.0, lr: 0.4}",
        ("optimizer.lr=8e-3",),
    ),
    "async, H = 50": Row(
        "compress: {kind: bf16}, mode: {kind: async_diloco, lr: 0.4}", ("optimizer.lr=8e-3",)
    ),
}
WARM, WARM_RATE = 1000, 2e-3  # steps and rate on one device, before any mode
SMALL = [
    *("model.layers=2", "model.width=32", "model.context=32", "data.context=32", "batch=64"),
    *("steps=3000", "steps_per_call=1"),
    *("evaluate.every=0", "checkpoint.every=0"),
]


def warm_state(program: Program) -> TrainState:
    """Return the state before the first step, with the parameters that all modes begin from."""
    _, make_state = makers(program.resolved.config, program.resolved.experiment)
    return jax.jit(make_state)((warm_params(program, WARM), program.initial_state().extra))


def warm_params(program: Program, steps: int) -> Params:
    """Return the parameters after steps on one device at a constant rate, on rows of another seed.

    They are stored in the folder for temporary files, from which the next run takes them.
    """
    schedule = Constant(warmup=50)
    optimizer = dataclasses.replace(
        program.resolved.config.optimizer, lr=WARM_RATE, schedule=schedule
    )
    seed = program.resolved.config.seed + 1000
    config = dataclasses.replace(
        program.resolved.config, parallel=Single(), steps=steps, seed=seed, optimizer=optimizer
    )
    key = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"jtrain_warm_{key}.npz"
    tree = jax.tree.structure(program.resolved.abstract_state.params)
    if not path.exists():
        single = set_up(config)
        batches = (single.place(single.batches().train[step]) for step in range(steps))
        state = train_loop(
            single.compile_step(), single.initial_state(), batches, start=0, stop=steps
        ).state
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
        np.savez(path, *leaves)
    with np.load(path) as found:
        return tree.unflatten([jnp.asarray(found[f"arr_{i}"]) for i in range(tree.num_leaves)])


def measure(name: str, *settings: str) -> dict[str, Any]:
    """Train, and return loss, bytes and seconds."""
    row = ROWS[name]
    values = [*SMALL, SERVER % row.parallel, *row.others, *settings]
    program = set_up(resolve(Path("configs/shakespeare.yaml"), values).config)
    state, stop = warm_state(program), program.resolved.config.steps
    began = time.monotonic()
    with thread_cluster(Plan(program)) as (coordinator, _):
        coordinator.start(0, state)
        state = take_steps(coordinator, state, start=0, stop=stop, hooks=()).state
        found = coordinator.statistics()
    seconds = time.monotonic() - began
    loss = program.measure(state)["loss"]
    training = found["worker_bytes"] - found["state_bytes"]
    return {"loss": loss, "bytes": training, "state": found["state_bytes"], "seconds": seconds}


def codecs(repeats: int = 7) -> None:
    """Print the time that encoding and decoding of 100 MB of gradients take, median of repeats."""
    leaves = [np.random.default_rng(0).standard_normal(25_000_000, np.float32)]
    print("| | bytes a number | encode, ms | decode, ms |\n|---|---|---|---|")
    for compress in (BFloat16(), Int8(), Int4(), E3M0(), TopK()):
        codec, times = make_codec(compress), []
        arrays = codec.encode(leaves)
        for _ in range(repeats):
            began = time.perf_counter()
            arrays = codec.encode(leaves)
            encoded = time.perf_counter()
            codec.decode(arrays, leaves)
            times.append((encoded - began, time.perf_counter() - encoded))
        encode, decode = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        size = sum(array.nbytes for array in arrays) / leaves[0].size
        print(f"| {compress.kind} | {size:.2f} | {encode:.0f} | {decode:.0f} |", flush=True)


def communication(only: str, settings: list[str], results: Path) -> None:
    """Measure the rows whose names begin with `only`, and print the table of all that are known."""
    if only == "codecs":
        codecs()
        return
    for name in ROWS:
        if name.startswith(only):
            line = json.dumps({"name": name, **measure(name, *settings)})
            print(f"# {line}", flush=True)
            with results.open("a") as file:
                file.write(f"{line}\n")
    rows = {row["name"]: row for row in map(json.loads, results.read_text().splitlines())}
    if "sync" not in rows:
        return
    base = rows["sync"]
    print("| | loss | against data parallel | MB | fewer bytes | own states, MB |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        fewer = base["bytes"] / row["bytes"]
        print(
            f"| {name} | {row['loss']:.3f} | {row['loss'] - base['loss']:+.3f} | "
            f"{row['bytes'] / 1e6:.1f} | {fewer:.1f} | {row['state'] / 1e6:.1f} |"
        )
