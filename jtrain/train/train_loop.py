"""The steps of a run, compiled, fed and watched."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jtrain.core.loop import IN_FLIGHT, LoopResult, StoppedError, train_loop
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.data.batches.not_finite import not_finite
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import all_gather
from jtrain.train.bad_steps import describe_bad_step, step_report
from jtrain.train.banner import opening
from jtrain.train.first_batch.first_batch import FirstBatch
from jtrain.train.first_batch.set_checks import check, look, look_at_sets
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.hooks.signals import Signals
from jtrain.train.leaked_tracers import explain_kept
from jtrain.train.run_hooks import RunHooks
from jtrain.train.setup import TrainSetup


def run_steps(
    parts: TrainSetup,
    step: StepFn,
    state: TrainState,
    watch: RunHooks,
    signals: Signals,
    *,
    hooks: Sequence[Observer] = (),
    start: int | None = None,
    news: Sequence[str] = (),
) -> LoopResult[TrainState]:
    """Where training ended, from the state at `start` on, and why if before the last step.

    Args:
        hooks: observers of the caller's, beside those of `watch`.
        start: the step that it goes on from; None for a run that begins.
        news: lines that are said beside the opening ones.

    Raises:
        ConfigError: if one of `hooks` is no hook, or waits for what there is not.
    """
    config = parts.config
    with make_reader(parts, start or 0, watch.saw) as feed:
        watch.waited = lambda: feed.waited
        for line in [*opening(parts, start), *news]:
            watch.lines.print(line)
        observers = [signals, *watch.hooks(hooks, state)]
        signals.fits, watch.reading = watch.grace.fits, signals.through
        try:
            watch.catch_up(start, state)
        except StoppedError as asked:
            return LoopResult(state, start or 0, asked.stop)
        over = watch.over()
        try:
            ended = train_loop(
                watch.twice.wrap(step) if watch.twice else step,
                state,
                signals.through(feed),
                start=start or 0,
                stop=start if start and over else config.steps,
                hooks=observers,
                steps_per_call=config.steps_per_call,
            )
        except TypeError as error:
            explained = explain_kept(error, parts.experiment.loss)
            if explained is None:
                raise
            raise explained from error
    watch.guarded.ended(ended.step)
    stop = ended.stop or (over if start else None)
    if stop is not None and stop.kind == "failed":
        bad, blame = watch.guarded.bad, _blame(parts, ended.step)
        if bad:  # in every process, each of which has read rows of its own
            first = next((each for each in all_gather(blame) if "every value" not in each), blame)
            late = f"The numbers of a step are read up to {IN_FLIGHT} calls late: it was found at "
            found = f"{late}step {ended.step}. " if ended.step > bad.step else ""
            blame = f"{found}{first} {describe_bad_step(parts, ended.state, bad, ended.step)}"
        why = f"{stop.why} {blame}"
        if bad:
            watch.guarded.wrote(bad, "stopped", why=why)
        stop = dataclasses.replace(stop, why=why)
    return dataclasses.replace(ended, stop=stop)


def compile_step(
    parts: TrainSetup, make: Callable[[], TrainState], start: int | None = None
) -> tuple[StepFn, TrainState]:
    """The compiled step, and the state that `make` gives beside its compilation.

    Args:
        start: the step that the run goes on from, whose batch is looked at.

    Raises:
        UserError: for what is wrong with the loss, or with the first batch that it gets.
    """
    looked = look(parts, start or 0)  # traced here, where a caller's `with jax...` holds
    with ThreadPoolExecutor(1) as beside:
        state, checked = beside.submit(make), beside.submit(parts.check_evaluation)
        others = beside.submit(_searched, parts, looked)
        with HEARTBEAT.during("compile"):
            step = parts.compile_step()
        with HEARTBEAT.during("restore"):
            made = state.result()
        checked.result()
        check(parts, others.result(), made)
        return step, made


def _searched(parts: TrainSetup, looked: Sequence[FirstBatch]) -> list[FirstBatch]:
    """These and the first batches of the sets, each searched."""
    found = [*looked, *look_at_sets(parts)]
    return [each for each in found if each.suspects is not None]


def make_reader(
    parts: TrainSetup, start: int, saw: Callable[[int, Batch], None] | None = None
) -> ReadAhead:
    """What each call of the step takes, from step `start` on; `saw` is shown it beforehand."""
    each = parts.config.steps_per_call
    start, stop = start // each, parts.config.steps // each
    calls = parts.calls_from(start, stop)

    def read(call: int) -> Batch:
        batch = calls(call)
        if saw:
            saw(call, batch)
        return parts.place(batch)

    return ReadAhead(read, start=start, stop=stop, close=calls.close)


def _blame(parts: TrainSetup, last: int) -> str:
    """What in the data may be why the loss is not finite any more."""
    window = getattr(parts.config.guard, "window", 0)  # the steps that the verdict is about
    seen = min(window, parts.config.steps) + 10 * parts.config.steps_per_call  # some were in flight
    rows_of = lambda step: step_report(parts, step).get("rows", ())
    return not_finite(parts.train, range(max(1, last - seen), last + 1), rows_of)
