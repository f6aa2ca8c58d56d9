"""The training loop: it feeds batches to a compiled step and calls the hooks."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax

from jtrain.core.types import Batch, Metrics

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


class StoppedError(Exception):
    """Raised while the loop waits for a batch, to end the run after the last complete step."""

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
        return _overrides(self, "on_state")

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Receive the metrics of a finished step, a few steps late; no device waits for it."""

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Receive the state before the next step donates it: keep copies, not references.

        Called after complete calls: `every` is a multiple of the steps of a call.
        """


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


def train_loop(
    step: Callable[[State, Batch], tuple[State, Metrics]],
    state: State,
    feed: Iterable[Batch],
    *,
    start: int,
    stop: int,
    hooks: Sequence[Hook] = (),
    steps_per_call: int = 1,
    in_flight: int = IN_FLIGHT,
) -> LoopResult[State]:
    """Run steps `start + 1 .. stop`; each hook sees each of its steps once, in order.

    Args:
        step: compiled; donates its state. Takes `steps_per_call` steps a call, and returns stacked
            metrics where there are several.
        feed: the batches of each call, already on the devices.
        in_flight: calls started and not yet finished. Metrics are read that late, so that no
            device waits for the host. (JAX 0.10 hangs at about 32 on several CPU devices.)
    """
    started: collections.deque[tuple[int, Metrics]] = collections.deque()
    latest: Metrics = {}
    watchers = [hook for hook in hooks if _overrides(hook, "on_state")]
    listeners = [hook for hook in hooks if _overrides(hook, "on_numbers")]
    asked: Stop | None = None

    def finish(most: int) -> Stop | None:  # until at most so many calls are in flight
        request = asked
        while len(started) > most:
            answer = _call_listeners(*started.popleft(), steps_per_call, listeners)
            request = request or answer
        return request

    batches, number = iter(feed), start
    while number < stop and asked is None:
        try:
            batch = next(batches)
        except StoppedError as error:
            asked = error.stop
            break
        # Batches are placed before the step. Checking that costs 17 us, so two calls are checked.
        guarded = number < start + 2 * steps_per_call
        with jax.transfer_guard("disallow") if guarded else contextlib.nullcontext():
            state, metrics = step(state, batch)
        number += steps_per_call
        latest = metrics
        started.append((number, metrics))
        for hook in watchers:
            if number % hook.every == 0:
                asked = finish(0) if hook.settles else asked
                answer = hook.on_state(number, state, metrics)
                asked = asked or answer
        asked = finish(in_flight)
    asked = finish(0)
    numbers = _by_step(jax.device_get(latest), steps_per_call)[-1] if latest else {}
    over = number >= stop or (asked is not None and asked.kind == "finished")
    if numbers and over and (asked is None or asked.kind != "failed"):
        for hook in listeners:
            if hook.last and number % hook.every:
                answer = hook.on_numbers(number, numbers)
                asked = asked or answer
    return LoopResult(state, number, asked, numbers)


def _call_listeners(
    last: int, metrics: Metrics, steps: int, listeners: Sequence[Hook]
) -> Stop | None:
    """Wait for the call that ended with step `last`, and call the hooks with its metrics."""
    jax.block_until_ready(jax.tree.leaves(metrics)[:1])  # one output is ready when all are
    numbers, asked = None, None
    for place, number in enumerate(range(last - steps + 1, last + 1)):
        for hook in listeners:
            if number % hook.every == 0:
                numbers = numbers or _by_step(jax.device_get(metrics), steps)
                answer = hook.on_numbers(number, numbers[place])
                asked = asked or answer
    return asked


def _by_step(metrics: Metrics, steps: int) -> list[dict[str, Any]]:
    values = {name: mean.value() for name, mean in metrics.items()}
    if steps == 1:
        return [values]
    return [{name: value[i] for name, value in values.items()} for i in range(steps)]


def _overrides(hook: Hook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(Hook, method)
