"""Bit flips: in one device's replica of a leaf, or in one of two computations of a step."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from chaos import subject
from chaos.trial import Trial
from jtrain.checkpoint import CheckpointManager, leaf_table
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Batch, Params
from jtrain.errors import DeviceError
from jtrain.parallel import Mirrored
from jtrain.train.hooks.recompute_check import RecomputeCheck
from jtrain.train.program import Program, set_up

DEVICES, CALM, LONGEST = 4, 100, 6  # devices; steps without a flip; at most steps before a flip
NOTHING = np.zeros(4, np.int32)  # leaf, element, bit, and whether to flip


def bit_flip(seed: int, folder: Path) -> Trial:
    """Flip one bit of a leaf or a gradient at a random step: the run has to end and name the place.

    In turn: a bit of one device's replica of the state, which the next save has to find; a bit of
    one result of a step that is computed twice; a bit of that step's gradient. If rounding removes
    the flip of a gradient, the state is correct and there is nothing to find.
    """
    began, draw = time.perf_counter(), np.random.default_rng(seed)
    kind = ("copy", "state", "gradient")[seed % 3]
    passed, detail = {"copy": _copy, "state": _state, "gradient": _gradient}[kind](draw, folder)
    return Trial("bit_flip", seed, passed, time.perf_counter() - began, f"{kind}: {detail}")


def calm(seed: int, folder: Path) -> Trial:
    """Compute all steps twice and save, without a flip: there must be no alarm."""
    began = time.perf_counter()
    try:
        _walk(_setup(), seed, CALM, _recompute(_program()[0]), folder / f"calm-{seed}")
    except DeviceError as error:
        return Trial("calm", seed, False, time.perf_counter() - began, str(error))
    return Trial("calm", seed, True, time.perf_counter() - began, f"{CALM} steps, no alarm")


def _copy(draw: np.random.Generator, folder: Path) -> tuple[bool, str]:
    program, steps = _setup(), int(draw.integers(1, LONGEST))
    state = _walk(program, int(draw.integers(100)), steps, _program()[0])
    device = int(draw.integers(DEVICES))
    name, state = _flipped(draw, state, device)
    with CheckpointManager(folder / "copy") as checkpoints:
        try:
            checkpoints.save(steps, state, {})
            checkpoints.wait()
        except DeviceError as error:
            found = name in str(error) and f"cpu:{device} of" in str(error)
            return found, f"{name} on device {device} at step {steps}: {error}"
    return False, f"{name} on device {device} at step {steps} was saved"


def _state(draw: np.random.Generator, folder: Path) -> tuple[bool, str]:
    del folder
    plain, steps, device = (
        _program()[0],
        int(draw.integers(1, LONGEST)),
        int(draw.integers(DEVICES)),
    )
    which, calls, flipped = int(draw.integers(2)), 0, ""

    def step(state: TrainState, batch: Batch) -> Any:
        nonlocal calls, flipped
        state, metrics = plain(state, batch)
        calls += 1
        if calls == 2 * steps - which:  # the first or the second computation of the last step
            flipped, state = _flipped(draw, state, device)
        return state, metrics

    return _found(step, int(draw.integers(100)), steps, lambda: flipped)


def _gradient(draw: np.random.Generator, folder: Path) -> tuple[bool, str]:
    del folder
    plain, hurt = _program()
    steps, which, calls = int(draw.integers(1, LONGEST)), int(draw.integers(2)), 0
    where = np.array([draw.integers(3), draw.integers(2**20), draw.integers(32), 1], np.int32)
    harmless = False

    def step(state: TrainState, batch: Batch) -> Any:
        nonlocal calls, harmless
        calls += 1
        if calls != 2 * steps - which:
            return plain(state, batch)
        good, _ = plain(jax.tree.map(jnp.copy, state), batch)
        bad, metrics = hurt(state, batch, where)
        harmless = _bytes(good) == _bytes(bad)
        return bad, metrics

    passed, detail = _found(step, int(draw.integers(100)), steps, lambda: "")
    if harmless:
        return not passed, f"bit {where[2]} of a gradient: rounded away"
    return passed, detail


def _found(step: Any, seed: int, steps: int, name: Callable[[], str]) -> tuple[bool, str]:
    try:
        _walk(_setup(), seed, steps, _recompute(step))
    except DeviceError as error:
        named = name() in str(error) and f"step {steps} " in str(error)
        return named, f"{name()} at step {steps}: {error}"
    return False, f"{name()} at step {steps} was not found"


def _recompute(step: Any) -> Any:
    twice = RecomputeCheck(every=1)
    wrapped = twice.wrap(step)

    def settled(state: TrainState, batch: Batch) -> Any:
        state, metrics = wrapped(state, batch)
        twice.compare_all()
        return state, metrics

    return settled


def _walk(
    program: Program, seed: int, steps: int, step: Any, saved: Path | None = None
) -> TrainState:
    """Return the state after some steps, on batches from `seed` on; save it at the end."""
    state = jax.tree.map(jnp.copy, _fresh())  # the first step donates its state
    for number in range(steps):
        state, _ = step(state, program.place(program.batches().stacked[seed * LONGEST + number]))
    if saved is not None:
        with CheckpointManager(saved, keep=1) as checkpoints:
            checkpoints.save(steps, state, {})
    return state


@functools.cache
def _setup() -> Program:
    return set_up(subject.config(parallel=Mirrored(devices=DEVICES)))


@functools.cache
def _fresh() -> TrainState:
    return _setup().initial_state()


@functools.cache
def _program() -> tuple[Any, Any]:
    """Return the step, and the same program with an argument that flips a gradient bit."""
    program = _setup()
    x = program.resolved.experiment

    def step(state: TrainState, batch: Batch, where: Any) -> Any:
        taken = make_step(x.loss, optax.chain(_flips(where), x.transformation))
        chained = dataclasses.replace(state, opt_state=(optax.EmptyState(), state.opt_state))
        after, metrics = taken(chained, batch)
        return dataclasses.replace(after, opt_state=_second(after.opt_state)), metrics

    to = jax.tree.map(lambda leaf: leaf.sharding, program.resolved.abstract_state)
    compiled = jax.jit(step, out_shardings=(to, None), donate_argnums=0)
    return lambda state, batch: compiled(state, batch, NOTHING), compiled


def _second(pair: Any) -> Any:
    return pair[1]


def _flips(where: Any) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Params | None = None) -> Any:
        del params
        flat, structure = jax.tree.flatten(updates)
        flat = [_flip(grad, where, where[3] * (where[0] == i)) for i, grad in enumerate(flat)]
        return jax.tree.unflatten(structure, flat), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _flip(grad: Any, where: Any, on: Any) -> Any:
    words = jax.lax.bitcast_convert_type(grad, jnp.uint32).reshape(-1)
    mask = on.astype(jnp.uint32) << where[2].astype(jnp.uint32)
    words = words.at[where[1] % words.size].set(words[where[1] % words.size] ^ mask)
    return jax.lax.bitcast_convert_type(words.reshape(grad.shape), grad.dtype)


def _flipped(draw: np.random.Generator, state: TrainState, device: int) -> tuple[str, TrainState]:
    """Flip a bit of one device's replica of one leaf; return the leaf's name and the state."""
    flat, structure = jax.tree.flatten(state)
    names = list(leaf_table.flatten(state))
    index = int(draw.integers(len(flat)))
    replicas = [np.array(shard.data) for shard in flat[index].addressable_shards]
    byte = replicas[device].reshape(-1).view(np.uint8)
    byte[draw.integers(byte.size)] ^= np.uint8(1 << draw.integers(8))
    devices = [shard.device for shard in flat[index].addressable_shards]
    arrays = [jax.device_put(*pair) for pair in zip(replicas, devices, strict=True)]
    flat[index] = jax.make_array_from_single_device_arrays(
        flat[index].shape, flat[index].sharding, arrays
    )
    return names[index], jax.tree.unflatten(structure, flat)


def _bytes(state: TrainState) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
