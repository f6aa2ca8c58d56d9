"""The training loop: it feeds batches to a compiled step and calls the hooks."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax
import numpy as np

from jtrain.core.types import Batch, Metrics
from jtrain.errors import ConfigError
from jtrain.errors.plain_numbers import plain_numbers

State = TypeVar("State")
IN_FLIGHT = 8  # calls started and not yet finished: metrics are read that late


@dataclasses.dataclass(frozen=True)
class Stop:
    """Answer of a hook that ends the run after the step it was called for."""

    why: str
    kind: Literal["interrupted", "finished", "failed"] = "interrupted"
    """interrupted: the run can be resumed; finished: it ended as intended; failed: a restart
    would fail again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback(Stop):
    """Answer of a hook that rolls the run back and skips the batch of a bad step."""

    step: int
    """The bad step; the first step of a run is 1."""
    back: int = 0
    """Batches before the bad one that are skipped too."""
    skip: int = 1
    """Batches that are skipped in all."""


class StoppedError(BaseException):
    """Raised while the loop waits for a batch, to end the run after the last complete step.

    No `except Exception` of a source that reads again after an error catches it.
    """

    def __init__(self, stop: Stop):
        super().__init__(stop.why)
        self.stop = stop


class Hook:
    """Observer of steps `every`, 2 `every`, ...; override one method or both."""

    every: int = 1
    settles: bool = False
    """Whether `on_numbers` of all hooks is called for a step before this hook sees its state."""
    last: bool = False
    """Whether the hook also sees the numbers of the last step, which `every` may not divide. A step
    at which a run was interrupted is not the last one: the run resumes there."""

    def reads_state(self) -> bool:
        """Return whether `on_state` needs the state now; if not, and it is far away, it gets None.

        Called before `on_state` at a step that `every` divides.
        """
        return overrides(self, "on_state")

    def on_done(self, step: int) -> None:
        """Note that the call that ended with `step` is done: of every call, before `on_numbers`."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Receive the metrics of a finished step, a few steps late; no device waits for it."""

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Receive the state after a call. The next call donates it: keep copies, not references."""


class StatelessHook(Hook):
    """Hook whose `on_state` reads no state: it counts calls, or keeps metrics."""

    def reads_state(self) -> bool:
        """Return False."""
        return False


@dataclasses.dataclass(frozen=True)
class LoopResult(Generic[State]):
    """State and step at which a loop ended, and the first request to end it, if there was one."""

    state: State
    step: int
    stop: Stop | None
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the last step, as `on_numbers` gets them; empty where no step was taken."""


@plain_numbers
def train_loop(
    step: Callable[[State, Batch], tuple[State, Metrics]],
    state: State,
    feed: Iterable[Batch],
    *,
    start: int,
    stop: int,
    hooks: Sequence[Hook] = (),
    steps_per_call: int | Callable[[int], int] = 1,
    in_flight: int = IN_FLIGHT,
) -> LoopResult[State]:
    """Run steps `start + 1 .. stop`; each hook sees each of its steps once, in order.

    Args:
        step: compiled; donates its state. Its metrics are stacked where a call takes several steps.
        feed: the batches of each call, already on the devices.
        steps_per_call: or the steps of the call after each step, the first of the stacked metrics.
        in_flight: calls started and not yet finished. Metrics are read that late, so that no
            device waits for the host. (JAX 0.10 hangs at about 32 on several CPU devices.)
    """
    started: collections.deque[tuple[range, Metrics]] = collections.deque()
    latest, steps = {}, range(0)
    stacked = callable(steps_per_call) or steps_per_call > 1
    watchers = [hook for hook in hooks if overrides(hook, "on_state")]
    listeners = [hook for hook in hooks if overrides(hook, "on_numbers")]
    clocks = [hook for hook in hooks if overrides(hook, "on_done")]
    asked: Stop | None = None

    def finish(most: int) -> Stop | None:  # until at most so many calls are in flight
        request = asked
        while len(started) > most:
            answer = _call_listeners(*started.popleft(), stacked, listeners, clocks)
            request = request or answer
        return request

    batches, number, checks = iter(feed), start, 2  # two calls are checked: it costs 17 us a call
    while number < stop and asked is None:
        try:
            batch = next(batches)
        except StoppedError as error:
            asked = error.stop
            break
        with _forbid_transfers(state, batch) if checks > 0 else contextlib.nullcontext():
            state, metrics = step(state, batch)
        checks -= 1
        count = steps_per_call(number) if callable(steps_per_call) else steps_per_call
        latest = metrics = _first_steps(metrics, count) if stacked else metrics
        steps, number = range(number + 1, number + count + 1), number + count
        started.append((steps, metrics))
        for hook in watchers:
            if number % hook.every == 0:
                asked = finish(0) if hook.settles else asked
                answer = check_answer(hook, hook.on_state(number, state, metrics))
                asked = asked or answer
        asked = finish(in_flight)
    asked = finish(0)
    numbers = _at_step(_fetch(latest), len(steps) - 1, stacked) if latest else {}
    over = number >= stop or (asked is not None and asked.kind == "finished")
    if numbers and over and (asked is None or asked.kind != "failed"):
        last = [hook for hook in listeners if hook.last and number % hook.every]
        asked = _call_all(last, number, numbers, asked)
    return LoopResult(state, number, asked, numbers)


def _forbid_transfers(state: Any, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Forbid implicit transfers, except of numpy arrays to the only device of a CPU's state."""
    host = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch))
    devices = {device for x in _arrays(state) for device in x.devices()}
    numpy_to_cpu = host and [device.platform for device in devices] == ["cpu"]
    return contextlib.nullcontext() if numpy_to_cpu else jax.transfer_guard("disallow")


def _call_listeners(
    steps: range, metrics: Metrics, stacked: bool, listeners: Iterable[Hook], clocks: Iterable[Hook]
) -> Stop | None:
    """Wait for the call that took `steps`, and call the hooks with its metrics."""
    for output in _arrays(metrics)[:1]:  # one is ready when all are
        output.block_until_ready()  # jax.block_until_ready takes 14 us, this 0.3 us
    for hook in clocks:
        hook.on_done(steps[-1])
    asked, due = None, [h for h in listeners if steps[-1] // h.every > (steps[0] - 1) // h.every]
    metrics = _fetch(metrics) if due else metrics
    for i, number in enumerate(steps if due else ()):
        if now := [hook for hook in due if number % hook.every == 0]:
            asked = _call_all(now, number, _at_step(metrics, i, stacked), asked)
    return asked


def _fetch(metrics: Metrics) -> Metrics:
    """Return the metrics on the host; on a CPU `jax.device_get` takes ten times as long."""
    if any(device.platform != "cpu" for x in _arrays(metrics)[:1] for device in x.devices()):
        return jax.device_get(metrics)
    return jax.tree.map(np.asarray, metrics)


def _arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def _call_all(
    hooks: Iterable[Hook], number: int, numbers: Mapping[str, Any], asked: Stop | None
) -> Stop | None:
    for hook in hooks:
        answer = check_answer(hook, hook.on_numbers(number, numbers))
        asked = asked or answer
    return asked


def check_answer(hook: Hook, answer: Any) -> Stop | None:
    """Return what a hook returned, a `Stop` or nothing.

    Raises:
        ConfigError: if it is anything else.
    """
    if answer is None or isinstance(answer, Stop):
        return answer
    name = type(hook).__name__
    raise ConfigError(
        f"{'a hook' if name.startswith('_') else name} returned {answer!r}. To end the run return "
        f'jt.Stop("why"), and otherwise None.'
    )


def _first_steps(metrics: Metrics, count: int) -> Metrics:
    return metrics if len(jax.tree.leaves(metrics)[0]) == count else _slice(metrics, count)


_slice = jax.jit(lambda tree, count: jax.tree.map(lambda x: x[:count], tree), static_argnums=1)


def _at_step(metrics: Metrics, i: int, stacked: bool) -> dict[str, Any]:
    means = jax.tree.map(lambda x: x[i], metrics) if stacked else metrics
    return {name: mean.value() for name, mean in means.items()}


def overrides(hook: Hook, method: str) -> bool:
    """Return whether a hook has a method of its own."""
    return getattr(type(hook), method) is not getattr(Hook, method)
