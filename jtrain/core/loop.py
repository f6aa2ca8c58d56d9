"""The loop: feed batches to a compiled step, and tell the hooks what happened."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax

from jtrain.core.types import Batch, Metrics

State = TypeVar("State")
IN_FLIGHT = 8  # calls that are started and not yet done: so late are numbers read


@dataclasses.dataclass(frozen=True)
class Stop:
    """What a hook returns to end a run after the step it saw."""

    why: str
    kind: Literal["interrupted", "finished", "failed"] = "interrupted"
    """To be gone on with, the end that was wanted, or a fault that running again would repeat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback(Stop):
    """What a hook returns to go back to a checkpoint, and on without the batch of a bad step."""

    step: int
    """The bad one, the first of a run being 1."""
    back: int = 0
    """Batches before that one that are left out too."""
    skip: int = 1
    """Batches that are left out in all."""


class StoppedError(Exception):
    """Raised where a batch is waited for, to end a run after the last whole step."""

    def __init__(self, stop: Stop):
        super().__init__(stop.why)
        self.stop = stop


class Hook:
    """Observes steps `every`, 2 `every`, ... and changes nothing; override one method or both."""

    every: int = 1
    settles: bool = False
    """Whether all numbers up to a step are told before this hook sees the state after it."""
    last: bool = False
    """Whether it sees the numbers of the last step too, which `every` may not divide. A step at
    which a run was interrupted is not the last one: the run goes on from there."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Sees the metrics of a step that is done, some steps late; nothing waits for it."""

    def on_state(self, step: int, state: Any, metrics: Metrics) -> Stop | None:
        """Sees the state before the next step takes it (it is donated then), so it keeps copies.

        Called after whole calls: where a call takes several steps, `every` is a multiple of them.
        """


@dataclasses.dataclass(frozen=True)
class LoopResult(Generic[State]):
    """Where a loop ended, and what it was first asked for, if it was asked to end."""

    state: State
    step: int
    stop: Stop | None
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The metrics of the last step, as `on_numbers` gets them; none where no step was taken."""


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
    """Runs steps `start + 1 .. stop`; each hook sees each of its steps once, in order.

    Args:
        step: compiled; gives up the state it is given. Takes `steps_per_call` steps at once, and
            then returns metrics stacked.
        feed: what `step` takes at each call, already on the devices.
        in_flight: calls started and not yet done. Numbers are read that late, so that no device
            waits for the host. (JAX 0.10 stops for ever at about 32 on several CPU devices.)
    """
    started: collections.deque[tuple[int, Metrics]] = collections.deque()
    latest: Metrics = {}
    watchers = [hook for hook in hooks if _overrides(hook, "on_state")]
    listeners = [hook for hook in hooks if _overrides(hook, "on_numbers")]
    asked: Stop | None = None

    def finish(most: int) -> Stop | None:  # down to so many calls in flight
        why = asked
        while len(started) > most:
            told = _tell(*started.popleft(), steps_per_call, listeners)
            why = why or told
        return why

    batches, number = iter(feed), start
    while number < stop and asked is None:
        try:
            batch = next(batches)
        except StoppedError as error:
            asked = error.stop
            break
        # What reaches a step was placed beforehand. Watching that costs 17 us, so two calls are.
        watched = number < start + 2 * steps_per_call
        with jax.transfer_guard("disallow") if watched else contextlib.nullcontext():
            state, metrics = step(state, batch)
        number += steps_per_call
        latest = metrics
        started.append((number, metrics))
        for hook in watchers:
            if number % hook.every == 0:
                asked = finish(0) if hook.settles else asked
                wanted = hook.on_state(number, state, metrics)
                asked = asked or wanted
        asked = finish(in_flight)
    asked = finish(0)
    numbers = _by_step(jax.device_get(latest), steps_per_call)[-1] if latest else {}
    over = number >= stop or (asked is not None and asked.kind == "finished")
    if numbers and over and (asked is None or asked.kind != "failed"):
        for hook in listeners:
            if hook.last and number % hook.every:
                wanted = hook.on_numbers(number, numbers)
                asked = asked or wanted
    return LoopResult(state, number, asked, numbers)


def _tell(last: int, metrics: Metrics, steps: int, listeners: Sequence[Hook]) -> Stop | None:
    """Waits for a call that ended with step `last`, and tells its numbers."""
    jax.block_until_ready(jax.tree.leaves(metrics)[:1])  # all of a program is done when one is
    numbers, asked = None, None
    for place, number in enumerate(range(last - steps + 1, last + 1)):
        for hook in listeners:
            if number % hook.every == 0:
                numbers = numbers or _by_step(jax.device_get(metrics), steps)
                wanted = hook.on_numbers(number, numbers[place])
                asked = asked or wanted
    return asked


def _by_step(metrics: Metrics, steps: int) -> list[dict[str, Any]]:
    values = {name: mean.value() for name, mean in metrics.items()}
    if steps == 1:
        return [values]
    return [{name: value[i] for name, value in values.items()} for i in range(steps)]


def _overrides(hook: Hook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(Hook, method)
