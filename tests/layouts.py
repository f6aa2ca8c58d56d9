"""Steps of the tiny language model under any layout."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny_language import batches, init_params, loss_of

from jtrain.core.state import TrainState, new_state
from jtrain.core.step import make_step
from jtrain.parallel import FSDP, Mirrored, Single, Strategy

STRATEGIES = ["single", "mirrored jit", "mirrored shard_map", "mirrored pmap", "fsdp"]
EXPLICIT = ["mirrored explicit", "fsdp explicit"]


def strategy(name: str, devices: int) -> Strategy:
    """A strategy by its name in STRATEGIES; fsdp splits even the smallest leaf."""
    kind, _, impl = name.partition(" ")
    if kind == "single":
        assert devices == 1, "single is one device"
        return Single().build()
    if kind == "fsdp":
        return FSDP(devices=devices, min_size=0, explicit=impl == "explicit").build()
    if impl == "explicit":
        return Mirrored(devices=devices, explicit=True).build()
    return Mirrored(impl=impl, devices=devices).build()


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the matrix; `str` of it is the name of its test."""

    strategy: str
    devices: int
    microbatches: int
    data: str
    dropout: bool

    def __str__(self) -> str:
        draws = "dropout" if self.dropout else "plain"
        return (
            f"{self.strategy}-{self.devices} devices-{self.microbatches} microbatches-{self.data}-"
            f"{draws}"
        )

    def reference(self) -> "Case":
        """The same on one device with the batch whole."""
        return Case("single", 1, 1, self.data, self.dropout)


def keep_gradient() -> optax.GradientTransformation:
    """Changes nothing; its state is the gradient of the last step."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformation(zeros, lambda grads, state, params=None: (grads, grads))


def step_under(layout: Any, loss, params, batch, *, extra=(), dims=None, **options):
    """The loss and the gradient of a step of SGD under the values of a layout."""
    where, optimizer = layout.build(), optax.chain(keep_gradient(), optax.sgd(0.1))
    state = jax.device_get(new_state(params, optimizer, jax.random.key(1), extra))
    step = make_step(loss, optimizer, psum=where.psum, **options)
    state, placed = jax.device_put(state, where.shardings(state, dims or {})), where.place(batch)
    state, metrics = where.compile(step, state, placed, returns_state=True)(state, placed)
    return metrics["loss"].value(), jax.device_get(state.opt_state[0])


OPTIMIZERS = {
    "sgd": optax.chain(keep_gradient(), optax.sgd(0.5)),
    "adamw": optax.chain(keep_gradient(), optax.adamw(1e-2)),
}


class Walk(NamedTuple):
    """What some steps gave, on the host."""

    losses: np.ndarray  # by step
    gradient: Any  # of the first step
    params: Any  # after the last
    extra: Any = ()  # after the last


def start(where: Strategy, optimizer: optax.GradientTransformation) -> TrainState:
    """A state of its own in the strategy's shardings, made there."""
    make = lambda key: new_state(init_params(key), optimizer, jax.random.key(1))
    shardings = where.shardings(jax.eval_shape(make, jax.random.key(0)))
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0))


@functools.cache
def _started(optimizer: str) -> TrainState:
    return start(Single().build(), OPTIMIZERS[optimizer])


class Walker:
    """The compiled step of a case, to be walked from the same start as often as is wanted."""

    def __init__(self, case: Case, optimizer: str = "sgd"):
        self.case, self._optimizer = case, optimizer
        self.strategy = strategy(case.strategy, case.devices)
        how = {"microbatches": case.microbatches, "ragged": case.data != "full"}
        loss = loss_of(case.data, case.dropout)
        step = make_step(loss, OPTIMIZERS[optimizer], psum=self.strategy.psum, **how)
        batch = self.strategy.place(next(batches(case.data, 1)))
        self.step = self.strategy.compile(step, self.start(), batch, returns_state=True)

    def start(self) -> TrainState:
        """The state before the first step; each is a copy, as the step takes it away."""
        state = jax.tree.map(lambda leaf: leaf.copy(), _started(self._optimizer))
        return jax.device_put(state, self.strategy.shardings(state))

    def walk(self, steps: int) -> Walk:
        """Takes `steps` steps from the start."""
        state, losses, gradient = self.start(), [], None
        for batch in batches(self.case.data, steps):
            state, metrics = self.step(state, self.strategy.place(batch))
            losses.append(metrics["loss"].value())
            gradient = jax.device_get(state.opt_state[0]) if gradient is None else gradient
        return Walk(np.array(losses), gradient, jax.device_get(state.params))


@functools.cache
def reference(case: Case, optimizer: str, steps: int) -> Walk:
    """What one device gives for the batch whole."""
    return walker(case.reference(), optimizer).walk(steps)


walker = functools.lru_cache(64)(Walker)  # compiled once for all that walk the same way
