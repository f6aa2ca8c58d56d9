"""Exactness of a large batch's gradient: against float64, and between layouts, by the rows.

Three models, each on one device with the batch whole, in microbatches, and over 8 forced host
devices. The reference is the same loss in float64, some rows at a time. The language model of
131,072 tokens takes most of an hour on two cores, the others a few minutes.

    python benchmarks/large_batches.py [--rows 4096 65536 262144] [--tokens 8x256 32x1024 32x4096]
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pairs import machine

import jtrain as jt
from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.core.step import make_step
from jtrain.losses.next_token import next_token
from jtrain.models.classifiers import MLP
from jtrain.models.transformer import Transformer
from jtrain.parallel import Mirrored, Single, Strategy
from jtrain.testing.float64 import to_float64, widen

Arrays: TypeAlias = Mapping[str, np.ndarray]
LAYOUTS: Mapping[str, tuple[Callable[[], Strategy], int]] = {
    "2 microbatches": (Single().build, 2),
    "16 microbatches": (Single().build, 16),
    "8 devices": (Mirrored(devices=8).build, 1),
    "8 devices, shard_map": (Mirrored(devices=8, impl="shard_map").build, 1),
}
VOCABULARY = 65


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, its parameters and a batch; the reference takes `at_once` rows at a time."""

    name: str
    loss: Callable[[Any, Any, Any], jt.Mean]
    params: Any
    batch: Arrays
    at_once: int


def regression(name: str, apply: Callable[[Any, Any], jax.Array], params: Any, rows: int) -> Case:
    """Return a squared error over `rows` points."""
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    batch = {"x": x, "y": np.sin(x.sum(1)).astype(np.float32), **whole(rows)}

    def loss(params, batch, rng):
        del rng
        return jt.Mean.of(jnp.square(apply(params, batch["x"]) - batch["y"]), batch["mask"])

    return Case(f"{name}, {rows:,} rows", loss, params, batch, 65_536)


def network(rows: int) -> Case:
    """Return a regression by the package's own network."""
    model = MLP(inputs=8, widths=(64, 64), classes=1).build()
    params = jax.jit(model.init)(jax.random.key(0))[0]
    return regression(
        "`MLP`", lambda p, x: model.apply(p, {}, x, train=True)[0][:, 0], params, rows
    )


def vector(rows: int) -> Case:
    """Return a regression whose last product, `x @ down`, is one of a matrix and a vector."""
    up, middle, down = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(up, (8, 64)) / 3,
        "middle": jax.random.normal(middle, (64, 64)) / 8,
        "down": jax.random.normal(down, (64,)) / 8,
    }
    apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p["up"]) @ p["middle"]) @ p["down"]
    return regression("`x @ vector`", apply, params, rows)


class RowByRow(Unplaced):
    """Attention to one row at a time: the scores of 32 x 4,096 tokens would take 4 GB."""

    def attend(self, attention, q, k, v, segments=None):
        """Return what each row takes from itself."""
        del segments
        of_row = jax.checkpoint(lambda qkv: attention(*[x[None] for x in qkv])[0])
        return jax.lax.map(of_row, (q, k, v))


def language(rows: int, time: int) -> Case:
    """Return a language model over characters as frequent as 1, 1/2, 1/3 ..."""
    values = Transformer(vocab=VOCABULARY, context=time, layers=2, heads=2, width=64)
    model = values.build(RowByRow())
    params = jax.jit(model.init)(jax.random.key(0))[0]
    # Away from where it starts, where the gradients of many leaves are small.
    draw = np.random.default_rng(3)
    params = jax.tree.map(lambda x: x + np.float32(0.02 * draw.normal(size=x.shape)), params)
    chances = 1 / np.arange(1, VOCABULARY + 1)
    tokens = draw.choice(VOCABULARY, size=(rows, time + 1), p=chances / chances.sum())

    def loss(params, batch, rng):
        del rng
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits, _ = model.apply(params, {}, inputs)
        real = jnp.broadcast_to(batch["mask"][:, None], inputs.shape)
        return next_token(logits, targets, real)[0]

    batch = {"tokens": tokens.astype(np.int32), **whole(rows)}
    return Case(f"transformer, {rows} x {time:,} tokens", loss, params, batch, 1)


def whole(rows: int) -> dict[str, np.ndarray]:
    """Return the row numbers and the mask of a full batch."""
    return {"row": np.arange(rows, dtype=np.int32), "mask": np.ones(rows, bool)}


def keep_gradient() -> optax.GradientTransformation:
    """Return an optimizer that changes nothing, whose state is the last gradient."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return updates, updates

    return optax.GradientTransformation(init, update)


def gradient(case: Case, where: Strategy, microbatches: int) -> dict[str, np.ndarray]:
    """Return the gradient that a step takes, by leaf."""
    optimizer = keep_gradient()
    make = lambda: jt.new_state(case.params, optimizer, jax.random.key(1))
    state = jax.jit(make, out_shardings=where.shardings(jax.eval_shape(make)))()
    step = make_step(case.loss, optimizer, microbatches=microbatches, psum=where.psum)
    batch = where.place(case.batch)
    state, _ = where.compile(step, state, batch, returns_state=True)(state, batch)
    return named_leaves(jax.device_get(state.opt_state))


def in_float64(case: Case) -> dict[str, np.ndarray]:
    """Return the gradient of the same loss in float64, by leaf."""
    total = lambda params, batch: case.loss(params, batch, None).total
    weight, found = 0, {}
    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(lambda *of: widen(total)(*of), allow_int=True))
        for first in range(0, len(case.batch["row"]), case.at_once):
            part = {n: x[first : first + case.at_once] for n, x in case.batch.items()}
            weight += float(case.loss(case.params, part, None).weight)
            leaves = named_leaves(jax.device_get(slope(to_float64(case.params), to_float64(part))))
            found = {name: found.get(name, 0) + leaf for name, leaf in leaves.items()}
    return {name: leaf / weight for name, leaf in found.items()}


def apart(got: Arrays, want: Arrays) -> tuple[float, float]:
    """Return the 2-norm of the difference as a share: over all leaves, and of the worst leaf."""
    size = {n: np.linalg.norm(np.float64(x)) for n, x in want.items()}
    off = {n: np.linalg.norm(np.float64(got[n]) - x) for n, x in want.items()}
    over_all = np.linalg.norm(list(off.values())) / np.linalg.norm(list(size.values()))
    return float(over_all), max(float(off[n] / size[n]) for n in want if size[n])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[4096, 65_536, 262_144])
    parser.add_argument("--tokens", nargs="*", default=["8x256", "32x1024", "32x4096"])
    asked = parser.parse_args()
    cases = [make(rows) for make in (network, vector) for rows in asked.rows]
    cases += [language(*map(int, size.split("x"))) for size in asked.tokens]
    print(f"{machine()}\n\nEach cell: the gradient over all leaves, and the worst leaf.\n")
    print(f"| | one device, against float64 | {' | '.join(LAYOUTS)} |")
    print(f"|---|{'---:|' * (1 + len(LAYOUTS))}")
    for case in cases:
        one = gradient(case, Single().build(), 1)
        cells = [apart(one, in_float64(case))]
        for build, microbatches in LAYOUTS.values():
            fits = len(case.batch["row"]) % microbatches == 0
            other = gradient(case, build(), microbatches) if fits else {}
            cells.append(apart(other, one) if fits else (np.nan, np.nan))
        words = " | ".join(f"{all_leaves:.1e}, {worst:.1e}" for all_leaves, worst in cells)
        print(f"| {case.name} | {words} |", flush=True)


if __name__ == "__main__":
    main()
