"""The training loop: it dispatches calls of a compiled step, and calls hooks where they are due."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from jtrain.core.types import Batch, Metrics
from jtrain.errors import ConfigError
from jtrain.errors.plain_numbers import plain_numbers

State = TypeVar("State")
IN_FLIGHT = 8  # calls started and not yet finished: metrics are read that late
NEVER = 2**62  # step of a hook that takes no state any more


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

    def on_numbers(self, step: int, numbers: dict[str, float]) -> Stop | None:
        """Receive the metrics of a finished step, some steps late; no device waits for it.

        The last step of a run is reported too, which `every` may not divide. A step at which a run
        was interrupted is not the last one: the run resumes there.
        """

    def on_state(self, step: int, state: Any) -> Stop | None:
        """Receive the state after a call, when the numbers of all steps up to it were reported.

        The next call donates the state: keep copies, not references.
        """

    def next_state(self, step: int) -> int:
        """Return the first step after `step` whose state the hook takes."""
        return step - step % self.every + self.every


class FinishedSteps(NamedTuple):
    """Steps that the devices have done."""

    steps: range
    metrics: Metrics
    """On the host, stacked over the steps."""
    calls: Sequence[tuple[int, float]]
    """Last step of each call, and `time.perf_counter()` when the call was done."""


class Recorder(Protocol):
    """Reader of the metrics of every step, many steps at a time."""

    def on_steps(self, finished: FinishedSteps) -> Stop | None:
        """Receive finished steps; each step of a run once, in order, before the hooks.

        How many there are depends on the other hooks. A `Stop` is returned at a multiple of
        `record_every` alone, so that neither the log nor a display decides where a run ends.
        """
        ...


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
    recorders: Sequence[Recorder] = (),
    between: Callable[[int], None] = lambda step: None,
    steps_per_call: int | Callable[[int], int] = 1,
    in_flight: int = IN_FLIGHT,
    record_every: int = 1,
) -> LoopResult[State]:
    """Run steps `start + 1 .. stop`; each hook sees each of its steps once, in order.

    Until the next step at which a hook is due, the loop only dispatches calls.

    Args:
        step: compiled; donates its state. Its metrics are stacked where a call takes several steps.
        feed: the batches of each call, already on the devices.
        recorders: get the metrics of every step, before the hooks.
        between: called with the step before each call; may raise `StoppedError`.
        steps_per_call: or the steps of the call after each step, the first of the stacked metrics.
        in_flight: calls started and not yet finished. Metrics are read that late, so that no
            device waits for the host. (JAX 0.10 hangs at about 32 on several CPU devices.)
        record_every: steps at whose multiples the recorders are called, beside the steps at which a
            hook is due.
    """
    stacked = callable(steps_per_call) or steps_per_call > 1
    calls = FinishedCalls(hooks, recorders, start, stacked=stacked, record_every=record_every)
    next_state = lambda number: min(stop, calls.next_state(number))
    started: collections.deque[tuple[range, Metrics]] = collections.deque()
    batches, number, due = iter(feed), start, next_state(start)
    checks = 2  # calls that are checked for transfers: it costs 17 us a call
    while number < stop and not calls.is_over(len(started) - in_flight):
        try:
            between(number)
            batch = next(batches)
        except StoppedError as error:
            calls.asked = calls.asked or error.stop
            break
        with _forbid_transfers(state, batch) if checks > 0 else contextlib.nullcontext():
            state, metrics = step(state, batch)
        checks -= 1
        count = steps_per_call(number) if callable(steps_per_call) else steps_per_call
        started.append((range(number + 1, number + count + 1), metrics))
        number += count
        while len(started) > (0 if number >= due else in_flight):
            if calls.add(*started.popleft()):  # a hook was called: it may be due at another step
                due = min(due, next_state(number))
        if number >= due:
            calls.deliver()
            calls.show(state, number)
            due = next_state(number)
    while started:
        calls.add(*started.popleft())
    calls.deliver()
    calls.end(number, over=number >= stop)
    return LoopResult(state, number, calls.asked, calls.last)


class FinishedCalls:
    """Finished calls, whose metrics are given to recorders and hooks where these are due.

    Args:
        start: the step before the first.
        stacked: whether the metrics of a call have a dim of its steps.
        record_every: steps at whose multiples the recorders are called, among others.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        recorders: Sequence[Recorder],
        start: int,
        *,
        stacked: bool,
        record_every: int,
    ):
        self._listeners = [hook for hook in hooks if overrides(hook, "on_numbers")]
        self._watchers = [hook for hook in hooks if overrides(hook, "on_state")]
        self._recorders, self._stacked = recorders, stacked
        self._record_every = record_every if recorders else 0
        self._calls: list[tuple[range, Metrics, float]] = []  # not yet delivered
        self._due = start + 1  # the first call is delivered when it is done
        self._finished, self._over = 0, -NEVER  # calls so far, and when the loop ends
        self._newest: tuple[Metrics, int] = {}, 0
        self.asked: Stop | None = None
        """The first request to end."""

    @property
    def last(self) -> dict[str, Any]:
        """Metrics of the last step that was delivered; empty before the first."""
        return _at_step(*self._newest)

    def is_over(self, late: int) -> bool:
        """Return whether the loop ends; several processes all end after the same call.

        Args:
            late: calls in flight, less those that there are while the loop only dispatches.
        """
        return self.asked is not None and self._finished + late >= self._over

    def add(self, steps: range, metrics: Metrics) -> bool:
        """Wait for a call; return whether a recorder or a hook was due, and got its metrics."""
        for output in _arrays(metrics)[:1]:  # one is ready when all are
            output.block_until_ready()  # jax.block_until_ready takes 14 us, this 0.3 us
        self._calls.append((steps, metrics, time.perf_counter()))
        self._finished += 1
        if steps[-1] < self._due:
            return False
        self.deliver()
        return True

    def deliver(self) -> None:
        """Give the metrics of all finished calls to the recorders, then to the hooks."""
        if not self._calls:
            return
        steps, metrics = self._join()
        ends = [(each[-1], at) for each, _, at in self._calls]
        self._calls.clear()
        for recorder in self._recorders:
            answer = recorder.on_steps(FinishedSteps(steps, metrics, ends))
            self._note(recorder, answer, steps[-1] - steps[-1] % self._record_every, ends)
        first, last = steps[0], steps[-1]
        due = {n for hook in self._listeners for n in _multiples(first, last, hook.every)}
        for number in sorted(due):
            numbers = _at_step(metrics, number - first)
            for hook in self._listeners:
                if number % hook.every == 0:
                    self._note(hook, hook.on_numbers(number, numbers), number, ends)
        self._newest = metrics, last - first
        cadences = [*(hook.every for hook in self._listeners), self._record_every]
        self._due = min((last - last % x + x for x in cadences if x), default=last + 1)

    def next_state(self, number: int) -> int:
        """Return the first step after `number` whose state a hook takes."""
        return min((hook.next_state(number) for hook in self._watchers), default=NEVER)

    def show(self, state: Any, number: int) -> None:
        """Give the state of a step to the hooks that take it."""
        for hook in self._watchers:
            if hook.next_state(number - 1) == number:
                self._note(hook, hook.on_state(number, state))

    def end(self, number: int, *, over: bool) -> None:
        """Give the last step to the hooks that did not see it, unless the run goes on later."""
        stop, last = self.asked, self.last
        if last and (stop.kind == "finished" if stop else over):
            for hook in self._listeners:
                if number % hook.every:
                    self._note(hook, hook.on_numbers(number, last))

    def _note(
        self, hook: Any, answer: Any, number: int = 0, ends: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Keep the first `Stop` that was returned.

        Of several processes one may wait for more calls than the others, for a hook of its own that
        takes a state: an answer to numbers counts where they arrive without that.

        Args:
            number: step whose numbers the answer is to, and `ends` of the calls that were given.

        Raises:
            ConfigError: if a hook returned anything else.
        """
        if answer is None or self.asked is not None:
            return
        if not isinstance(answer, Stop):
            name = type(hook).__name__
            raise ConfigError(
                f"{'a hook' if name.startswith('_') else name} returned {answer!r}. To end the "
                f'run return jt.Stop("why"), and otherwise None.'
            )
        self.asked = answer
        if ends and jax.process_count() > 1:
            later = sum(end >= number for end, _ in ends) - 1  # calls after that of the step
            self._over = self._finished - later

    def _join(self) -> tuple[range, Metrics]:
        calls = [metrics for _, metrics, _ in self._calls]
        steps = range(self._calls[0][0][0], self._calls[-1][0][-1] + 1)
        if any(x.platform != "cpu" for array in _arrays(calls[0])[:1] for x in array.devices()):
            calls = jax.device_get(calls)  # all at once; on a CPU it takes ten times as long
        leaves, tree = zip(*map(jax.tree.flatten, calls), strict=True)
        columns = [list(map(np.asarray, column)) for column in zip(*leaves, strict=True)]
        if self._stacked:  # a call may be shorter than its metrics
            sizes = [len(each) for each, _, _ in self._calls]
            cut = lambda column: [x[:n] for x, n in zip(column, sizes, strict=True)]
            join = lambda column: np.concatenate(cut(column))
        else:
            join = np.stack
        return steps, jax.tree.unflatten(tree[0], map(join, columns))


def _forbid_transfers(state: Any, batch: Batch) -> contextlib.AbstractContextManager[None]:
    """Forbid implicit transfers, except of numpy arrays to the only device of a CPU's state."""
    host = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch))
    devices = {device for x in _arrays(state) for device in x.devices()}
    numpy_to_cpu = host and [device.platform for device in devices] == ["cpu"]
    return contextlib.nullcontext() if numpy_to_cpu else jax.transfer_guard("disallow")


def _arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def _multiples(first: int, last: int, every: int) -> range:
    return range(-(-first // every) * every, last + 1, every)


def _at_step(metrics: Metrics, i: int) -> dict[str, Any]:
    return {name: jax.tree.map(lambda x: x[i], mean).value() for name, mean in metrics.items()}


def overrides(hook: Hook, method: str) -> bool:
    """Return whether a hook has a method of its own."""
    return getattr(type(hook), method) is not getattr(Hook, method)
