"""Schedule of calls: how many steps one call of the compiled step takes, and where calls end.

With `steps_per_call: auto` a call of a small step takes several. The number follows from the FLOPs
and the bytes of a step, never from a clock, so it is the same on every machine of a kind and in
every resume. A call ends at each multiple of that number and of each cadence that needs the state,
so the steps between two of these ends take a shorter call. The program takes the number of its
steps as an argument: where calls end changes no bit of a result.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax

from jtrain.core.interpret import equations_in, executions
from jtrain.core.loop import IN_FLIGHT, Hook, overrides
from jtrain.core.state import TrainState
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.data.batches.step_batches import SkipBatches, StackedBatches
from jtrain.data.batches.workers import Workers
from jtrain.distributed.multihost import all_gather
from jtrain.errors import ConfigError
from jtrain.parallel import Strategy
from jtrain.parallel.offload import is_on_host
from jtrain.train.experiment import RunConfig
from jtrain.train.flops import product_flops

CALLS_IN_FLIGHT = 2  # of several steps: long enough that no device waits for the host
MAX_STEPS = 50  # of a call: a step then has 1/50 of the overhead of a call
MIN_PROGRAM_STEPS = 2  # of a program for several: for one XLA:CPU gives other bits (decisions.md)
MAX_CALL_SECONDS = 20e-3
LONG_STEP_SECONDS = 1e-3  # of a step that is a call by itself
MAX_STACK_BYTES = 16e6  # of the batches of a call
GRADIENT_COST = 3  # of the loss: the backward pass costs twice as much as the forward pass
# FLOPs and bytes a second of a small step, far below the peak: only the size has to be right.
RATES = {"cpu": (2e10, 1e10), "gpu": (2e13, 1e12), "tpu": (2e13, 5e11)}


@dataclasses.dataclass(frozen=True)
class CallEnds:
    """Steps after which hooks take the state."""

    cadences: Set[int] = frozenset()
    """Steps of whose multiples a hook takes it."""
    points: Set[int] = frozenset()


def find_call_ends(hooks: Sequence[Hook], stop: int) -> CallEnds:
    """Return where hooks of any process take the state; all processes call this.

    A hook that one process alone has ends the calls of all: they run one program.
    """
    takes_state = [hook for hook in hooks if overrides(hook, "on_state")]
    points = [point for hook in takes_state for point in _points(hook, stop)]
    takes_state = [hook for hook in takes_state if not overrides(hook, "next_state")]
    found = all_gather([[hook.every for hook in takes_state], points])
    return CallEnds(*(frozenset().union(*each) for each in zip(*found, strict=True)))


def _points(hook: Hook, stop: int) -> Iterator[int]:
    """Yield the steps up to `stop` at which a hook that has no cadence takes the state."""
    step = 0
    while overrides(hook, "next_state") and (step := hook.next_state(step)) <= stop:
        yield step


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallSchedule:
    """Steps of each call of a run."""

    longest: int
    """Steps that the program takes in a call, at most."""
    stop: int
    varies: bool = False
    """Whether calls may be shorter; else each has `longest` steps, which divides every cadence."""
    ends: tuple[int, ...] = ()
    """Cadences at whose multiples a call ends."""
    points: tuple[int, ...] = ()
    """Steps at which a call ends."""
    update_seconds: float = 0.0
    """Rough time in which a step reads and writes its state, without its loss."""
    why: str = ""
    """Why calls have so many steps, as a line of the log; empty where the config says it."""

    @property
    def stacked(self) -> bool:
        """Whether a call takes arrays k b ... and returns metrics k ...."""
        return self.varies or self.longest > 1

    @property
    def steps_per_call(self) -> int | Callable[[int], int]:
        """Steps of a call, as `train_loop` takes them."""
        return self.steps if self.varies else self.longest

    @property
    def in_flight(self) -> int:
        """Calls that are started and not yet finished: metrics are read that late."""
        return CALLS_IN_FLIGHT if self.varies else IN_FLIGHT

    def steps(self, first: int) -> int:
        """Return the steps of the call that begins after step `first`."""
        if not self.varies:
            return self.longest
        ends = [first + x - first % x for x in (self.longest, *self.ends)]
        return min(self.stop, *ends, *(x for x in self.points if x > first)) - first

    def after(self, first: int) -> int:
        """Return the last step of the call that begins after step `first`."""
        return first + self.steps(first)

    def first(self, step: int) -> int:
        """Return the step after which the call with `step` begins."""
        ends = [(step - 1) // x * x for x in (self.longest, *self.ends)]
        return max(*ends, *(x for x in self.points if x < step), 0)

    def ending_at(self, *steps: int) -> "CallSchedule":
        """Return the schedule whose calls end at these steps, too, where calls may be shorter."""
        points = tuple(sorted({*self.points, *steps}))
        return dataclasses.replace(self, points=points) if self.varies else self

    def ending_for(self, hooks: CallEnds) -> "CallSchedule":
        """Return the schedule whose calls end where hooks take the state, too.

        The program is compiled for no more steps than a call then has, whose batches it is given.
        """
        if not self.varies or hooks == CallEnds():
            return self
        longest, why = min([self.longest, *self.ends]), self.why  # of the steps of all calls
        least = min([longest, *hooks.cadences])
        if least < longest:
            every = f"{least} steps" if least > 1 else "step"
            why = (
                f"steps_per_call: auto is {least} here, as a hook takes the state at every {every}."
                f" With every={longest} for this hook, on_state(function, every={longest}), it "
                f"would be {longest}: faster"
            )
        longest = max(MIN_PROGRAM_STEPS, least)
        ends = tuple(
            sorted({x for x in {self.longest, *self.ends, *hooks.cadences} if x % longest})
        )
        points = tuple(sorted({*self.points, *hooks.points}))
        return dataclasses.replace(self, longest=longest, ends=ends, points=points, why=why)


def choose_schedule(
    config: RunConfig,
    strategy: Strategy,
    abstract_state: TrainState,
    trace_loss: Callable[[], Any],
    read_batch: Callable[[], Mapping[str, Any]],
    *,
    evaluates: bool,
    untimed: Set[str] = frozenset(),
) -> CallSchedule:
    """Return the schedule of a run; with `auto` the loss is traced, unless the state is large.

    A step is a call by itself where the strategy has a loop of its own, workers read the batches,
    the state is offloaded, the loss has a loop whose length depends on its data, or XLA:CPU would
    run convolutions in a loop, which it does slowly.

    Args:
        trace_loss: returns the jaxpr of the loss.
        read_batch: returns the arrays of a batch in this process.
        untimed: keys of cadences in time, before a step is timed: they end no call.
    """
    leaves = jax.tree.leaves(abstract_state)
    devices = leaves[0].sharding.device_set
    platform = next(iter(devices)).platform
    seconds = update_seconds(abstract_state, platform, strategy.shares)

    def choose() -> CallSchedule:
        if config.steps_per_call != "auto":
            return CallSchedule(longest=config.steps_per_call, stop=config.steps)
        single = CallSchedule(longest=1, stop=config.steps)
        if seconds >= LONG_STEP_SECONDS or any(map(is_on_host, leaves)):
            return single
        if config.workers.count or strategy.loop != Strategy.loop:
            return single
        traced = trace_loss()
        names = {x.primitive.name for x in equations_in(traced)}
        if "while" in names or (platform == "cpu" and "conv_general_dilated" in names):
            return single
        each = seconds + loss_seconds(traced, platform, len(devices))
        size = sum(x.nbytes for x in read_batch().values())
        return auto_schedule(config, each, size, evaluates=evaluates, untimed=untimed)

    return dataclasses.replace(choose(), update_seconds=seconds)


def auto_schedule(
    config: RunConfig,
    seconds: float,
    batch_bytes: int,
    *,
    evaluates: bool = True,
    untimed: Set[str] = frozenset(),
) -> CallSchedule:
    """Return the schedule of `steps_per_call: auto`.

    Args:
        seconds: of a step, estimated by its FLOPs and bytes.
        batch_bytes: of the arrays of a batch in this process.
        evaluates, untimed: as `choose_schedule` takes them.
    """
    limits = MAX_STEPS, MAX_CALL_SECONDS / seconds, MAX_STACK_BYTES / max(batch_bytes, 1)
    fit = int(min(limits))
    if seconds >= LONG_STEP_SECONDS or fit < 2:
        return CallSchedule(longest=1, stop=config.steps)
    unneeded = {*untimed, *(() if evaluates else ["evaluate.every"])} - {"steps"}
    every = {key: x for key, x in config.cadences().items() if key not in unneeded}
    cadences = {key: x for key, x in every.items() if isinstance(x, int) and x}
    (key, least), *others = sorted(cadences.items(), key=lambda pair: pair[1])
    longest = min(fit, least)
    more = min([fit, *(x for _, x in others)])  # if the shortest cadence were longer
    program = max(MIN_PROGRAM_STEPS, longest)
    why = f"a step takes about {1e3 * seconds:.1g} ms, by its FLOPs and bytes"
    if least < fit and key != "steps":
        why = f"{key} is {least}"
        if more > longest:
            why += f". With {key}={more} or more it would be {more}, which trains faster"
    return CallSchedule(
        longest=program,
        stop=config.steps,
        varies=True,
        ends=tuple(sorted({x for x in cadences.values() if x % program})),
        why=config.rename_keys(f"steps_per_call: auto is {longest} here, as {why}"),
    )


def loss_seconds(loss: Any, platform: str, devices: int) -> float:
    """Return the rough time of a loss and its gradient, which costs twice as much as the loss.

    Args:
        loss: its jaxpr, in which the body of a scan counts once for each iteration.
        devices: that share the work.
    """
    flops = moved = 0.0
    for eqn, times, _ in executions(loss):
        flops += times * (product_flops(eqn, lower_bound=True) or 0.0)
        moved += times * sum(x.aval.size * x.aval.dtype.itemsize for x in eqn.outvars)
    flops_rate, bytes_rate = RATES.get(platform, RATES["gpu"])
    return GRADIENT_COST * max(flops / flops_rate, moved / bytes_rate) / devices


def update_seconds(state: TrainState, platform: str, devices: int) -> float:
    """Return the rough time in which a step reads and writes its state, without its loss."""
    # It is read and written, and gradients and updates are about as much again.
    moved = 3 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return moved / devices / RATES.get(platform, RATES["gpu"])[1]


Observe: TypeAlias = Callable[[int, Sequence[Batch]], None]


class CallBatches:
    """Batches of each call of a run.

    Args:
        train: batch of each step, as this process reads it.
    """

    def __init__(self, train: SkipBatches, schedule: CallSchedule):
        self.train, self.schedule = train, schedule
        self.stacked = StackedBatches(train, schedule.longest, stacked=schedule.varies)
        """Batches of calls that all have the most steps."""

    def read(self, first: int) -> Batch:
        """Return the batches of the call that begins after step `first`, as numpy arrays."""
        if self.schedule.varies:
            return self.stacked.read(first, self.schedule.steps(first))
        return self.stacked[first // self.schedule.longest]

    def read_ahead(
        self,
        workers: Workers,
        start: int,
        place: Callable[[Batch, int], Any],
        observe: Observe | None = None,
    ) -> ReadAhead[Batch]:
        """Return the batches of each call after step `start`, on the devices; close it after use.

        Args:
            place: puts the batch of the call after a step on the devices.
            observe: called with the step before each call and the batches of its steps.

        Raises:
            ConfigError: if `start` lies within a call that cannot be shorter.
        """
        longest, varies = self.schedule.longest, self.schedule.varies
        if start % longest and not varies:
            raise ConfigError(
                f"the run resumes from step {start}, which is not a multiple of steps_per_call, "
                f"{longest}. Set steps_per_call=auto, or steps_per_call=1."
            )
        read, close = self.read, lambda: None
        if not varies:  # several workers read calls of one length alone, by their number
            stop = self.schedule.stop // longest
            reader = workers.build(self.stacked.__getitem__, start=start // longest, stop=stop)
            read, close = (lambda step: reader(step // longest)), reader.close

        def get(step: int) -> Batch:
            batch = read(step)
            if observe is not None:
                observe(step, split_steps(batch, self.schedule.stacked))
            return place(batch, step)

        stop, after = self.schedule.stop, self.schedule.after
        return ReadAhead(get, start=start, stop=stop, after=after, close=close)


def split_steps(batch: Mapping[str, Any], stacked: bool) -> list[Mapping[str, Any]]:
    """Return the batch of each step of a call."""
    if not stacked:
        return [batch]
    count = len(next(iter(batch.values())))
    return [{name: x[i] for name, x in batch.items()} for i in range(count)]
