"""Values that are not finite, injected into a run that rolls back and skips their batch."""

import dataclasses
import os
import random
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from chaos.trial import Trial
from jtrain.checkpoint.inspect import diff_checkpoints, resolve_step
from jtrain.config.configclass import configclass
from jtrain.config.sections import RollbackPolicy
from jtrain.config.top import CheckpointConfig, LogConfig
from jtrain.core.loop import Hook
from jtrain.core.loss import stateful
from jtrain.core.mean import Mean
from jtrain.core.placement import Placement
from jtrain.core.pytree import named_leaves
from jtrain.core.types import Batch, Extra, Key, Leaf, Metrics, Params
from jtrain.data import Arrays, Shuffled
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.optim import AdamW
from jtrain.parallel import Single
from jtrain.train.experiment import Experiment, RunConfig
from jtrain.train.run import run

SIZES = {"up": (2, 8), "bias": (8,), "down": (8, 3)}
Place: TypeAlias = Literal[
    "parameter up",
    "parameter bias",
    "parameter down",
    "gradient up",
    "gradient bias",
    "gradient down",
    "total of the loss",
    "total of a change of extra",
    "the batch",
]
"""The place of a fault."""
PLACES: tuple[Place, ...] = get_args(Place)
VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e4": 1e4}
STEPS, EVERY = 12, 4  # of a trial, and between its checkpoints


@configclass
class Fault:
    """A value that is not finite, or large, in one place of one batch."""

    batch: int
    """Index of the batch, from 0."""
    place: Place
    """The place of the fault."""
    value: Literal["nan", "inf", "-inf", "1e4"] = "nan"
    """The value that is added there."""
    row: int = 0
    """The row of the batch that carries the fault."""


@configclass
class Data:
    """Points around three corners."""

    faults: tuple[Fault, ...] = ()
    """Faults in the points."""


@configclass
class Config(RunConfig):
    """A small classifier of points with running statistics, whose data has faults."""

    data: Data = Data()
    """The points."""

    def build(self, place: Placement) -> Experiment:
        """Build the experiment: points around three corners."""
        del place
        draw = np.random.default_rng(0)
        label = draw.integers(3, size=200).astype(np.int32)
        corner = np.array([[0, 1], [1, -1], [-1, -1]], np.float32)[label]
        points = Arrays(x=corner + draw.normal(size=(200, 2)).astype(np.float32), label=label)
        return Experiment(
            init=_init,
            loss=stateful(_loss),
            train=Faulty(Shuffled(points, size=self.batch, seed=self.seed), self.data.faults),
            optimizer=self.optimizer,
        )


class Faulty:
    """Batches with an array `fault` (float32, b places), which is 0 without a fault."""

    ragged = False

    def __init__(self, batches: Shuffled, faults: tuple[Fault, ...]):
        self._batches, self._faults, self.size = batches, faults, batches.size

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        batch = self._batches[number]
        fault = np.zeros((len(batch["row"]), len(PLACES)), np.float32)
        for each in self._faults:
            if each.batch == number:
                fault[batch["row"] == each.row, PLACES.index(each.place)] = VALUES[each.value]
        return {**batch, "fault": fault}

    def indices(self, number: int) -> np.ndarray:
        """Return the rows of the points in a batch."""
        return self._batches.indices(number)

    def shard(self, index: int, count: int) -> "Faulty":
        """Return the batches of one process."""
        return Faulty(self._batches.shard(index, count), self._faults)


def injected(seed: int, folder: Path) -> Trial:
    """Run with one fault: the run stays clean, and ends like a run that skips the fault's batch.

    The place, the batch, the row and the value follow from the seed. There are two runs in a
    folder: one rolls back when it meets the fault, and one skips the batch from the beginning. All
    states of the first are checked; both end with the same bits and the same metrics.jsonl.
    """
    began, folder = time.monotonic(), folder / f"{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # from an earlier trial
    draw = random.Random(f"numbers {seed}")
    back, after = draw.choice([(0, 1), (0, 3), (2, 4)])
    fault = Fault(
        batch=draw.randrange(STEPS),
        place=draw.choice(PLACES),
        value=draw.choice(("nan", "inf", "-inf")),
        row=draw.randrange(16),
    )
    first = max(0, fault.batch - back)
    went = config(folder.name, (fault,), RollbackPolicy(back=back, skip=after))
    never = config(folder.name, (fault,), RollbackPolicy(without=((first, first + after),)))
    checks = FiniteCheck()
    with open(os.devnull, "w") as nowhere:
        ends = [
            run(each, hooks=hooks, screen=nowhere, directory=folder / name)
            for name, each, hooks in (("went", went, [checks]), ("never", never, []))
        ]
    wrong = [f"step {step}: {leaf}" for step, leaf in checks.found]
    wrong += [f"{end.directory.path.name}: {end.why}" for end in ends if end.status != "done"]
    wrong += different(*(end.directory.path for end in ends))
    if checks.states <= STEPS and first < STEPS:
        wrong.append("the run did not roll back")
    where = f"{fault.value} in {fault.place}, batch {fault.batch}, row {fault.row}"
    detail = f"{where}; without {first} .. {first + after - 1}" + "".join(f"; {w}" for w in wrong)
    return Trial("injected", seed, not wrong, time.monotonic() - began, detail)


def config(name: str, faults: tuple[Fault, ...] = (), guard: Any = None, **more: Any) -> Config:
    """Return the config of a run of STEPS steps on one device."""
    others: dict[str, Any] = {
        "parallel": Single(),
        "checkpoint": CheckpointConfig(every=EVERY),
        "optimizer": AdamW(lr=3e-2, clip=1.0, ema=0.9),
        "log": LogConfig(every=1),
        **more,
    }
    guard = {} if guard is None else {"guard": guard}
    return Config(
        experiment="faulty",
        name=name,
        steps=STEPS,
        batch=16,
        data=Data(faults=faults),
        **guard,
        **others,
    )


class FiniteCheck(Hook):
    """Hook that checks every state."""

    def __init__(self) -> None:
        self.states, self.found = 0, list[tuple[int, str]]()

    def on_state(self, step: int, state: Any) -> None:
        """Record the names of leaves that are not finite."""
        self.states += 1
        for name, leaf in named_leaves(state).items():
            if jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(leaf).all():
                self.found.append((step, name))


def different(one: Path, other: Path) -> list[str]:
    """Return the differences between the last states and the metrics of two runs."""
    places = [path / "checkpoints" for path in (one, other)]
    steps = [(place, resolve_step(place, "newest")) for place in places]
    wrong = [row["leaf"] for row in diff_checkpoints(*steps)] + ["the step"] * (
        steps[0][1] != steps[1][1]
    )
    if (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes():
        wrong.append("metrics.jsonl")
    return [f"{name} differs" for name in wrong]


def _init(key: Key) -> tuple[Params, Extra]:
    keys = jax.random.split(key, len(SIZES))
    draw = lambda key, shape: jax.random.normal(key, shape) / 3
    params = {n: draw(k, shape) for k, (n, shape) in zip(keys, SIZES.items(), strict=True)}
    return params, {"mean": jnp.zeros(2), "still": jnp.ones(3)}


def _loss(
    params: Params, extra: Extra, batch: Batch, rng: Key | None
) -> tuple[Mean, Metrics, Extra]:
    del rng
    fault = dict(zip(PLACES, batch["fault"].sum(0), strict=True))
    cast = lambda place, leaf: fault[place].astype(leaf.dtype)
    w = {n: p + cast(f"parameter {n}", p) for n, p in params.items()}
    w = {n: _tainted(p, cast(f"gradient {n}", p)) for n, p in w.items()}
    x = batch["x"] + fault["the batch"]
    up = (x - extra["mean"][None]).astype(w["up"].dtype) @ w["up"] + w["bias"][None]
    logits = (up + jnp.tanh(up)) @ w["down"]  # tanh alone would map an infinity back to 1
    loss, metrics = cross_entropy(logits, batch["label"], batch["mask"])
    loss = dataclasses.replace(loss, total=loss.total + fault["total of the loss"])
    rows = batch["mask"].astype(jnp.float32)
    new = 0.9 * extra["mean"][None] + 0.1 * batch["x"] + fault["total of a change of extra"]
    mean = Mean((new * rows[:, None]).sum(0), rows.sum())
    return loss, metrics, {**extra, "mean": mean}


@jax.custom_vjp
def _tainted(leaf: Leaf, fault: Leaf) -> Leaf:
    """Return `leaf`, to whose gradient `fault` is added."""
    del fault
    return leaf


_tainted.defvjp(
    lambda leaf, fault: (leaf, fault), lambda fault, up: (up + fault, jnp.zeros_like(fault))
)
