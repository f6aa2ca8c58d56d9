"""Steps of a run: compile the step, feed it, and call the hooks."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jtrain.core.loop import IN_FLIGHT, LoopResult, StoppedError, train_loop
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Batch
from jtrain.data import ReadAhead
from jtrain.data.batches.not_finite import describe_nonfinite
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import all_gather
from jtrain.train.bad_steps import describe_bad_step, step_report
from jtrain.train.banner import banner_lines
from jtrain.train.first_batch.first_batch import FirstBatch
from jtrain.train.first_batch.set_checks import check_batches, trace_set_batches, trace_train_batch
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.hooks.signals import Signals
from jtrain.train.leaked_tracers import explain_leaked_tracer
from jtrain.train.run_hooks import RunHooks
from jtrain.train.setup import TrainSetup


def run_steps(
    setup: TrainSetup,
    step: StepFn,
    state: TrainState,
    run_hooks: RunHooks,
    signals: Signals,
    *,
    hooks: Sequence[Observer] = (),
    start: int | None = None,
    notices: Sequence[str] = (),
) -> LoopResult[TrainState]:
    """Train from the state at `start`; return the last state, and why it stopped early if it did.

    Args:
        hooks: observers of the caller, beside those of `run_hooks`.
        start: the step that the run resumes from; None for a new run.
        notices: lines to log after the banner.

    Raises:
        ConfigError: if one of `hooks` is no hook, or waits for a set that does not exist.
    """
    config = setup.config
    with make_reader(setup, start or 0, run_hooks.saw) as feed:
        run_hooks.waited = lambda: feed.waited
        for line in [*banner_lines(setup, start), *notices]:
            run_hooks.lines.print(line)
        observers = [signals, *run_hooks.hooks(hooks, state)]
        signals.fits, run_hooks.reading = run_hooks.grace.fits, signals.through
        try:
            run_hooks.catch_up(start, state)
        except StoppedError as asked:
            return LoopResult(state, start or 0, asked.stop)
        over = run_hooks.over()
        try:
            ended = train_loop(
                run_hooks.twice.wrap(step) if run_hooks.twice else step,
                state,
                signals.through(feed),
                start=start or 0,
                stop=start if start and over else config.steps,
                hooks=observers,
                steps_per_call=config.steps_per_call,
            )
        except TypeError as error:
            explained = explain_leaked_tracer(error, setup.experiment.loss)
            if explained is None:
                raise
            raise explained from error
    run_hooks.guarded.ended(ended.step)
    stop = ended.stop or (over if start else None)
    if stop is not None and stop.kind == "failed":
        bad, blame = run_hooks.guarded.bad, _blame(setup, ended.step)
        if bad:  # in every process, each of which has read rows of its own
            first = next((each for each in all_gather(blame) if "every value" not in each), blame)
            late = f"The numbers of a step are read up to {IN_FLIGHT} calls late: it was found at "
            found = f"{late}step {ended.step}. " if ended.step > bad.step else ""
            blame = f"{found}{first} {describe_bad_step(setup, ended.state, bad, ended.step)}"
        why = f"{stop.why} {blame}"
        if bad:
            run_hooks.guarded.record(bad, "stopped", why=why)
        stop = dataclasses.replace(stop, why=why)
    return dataclasses.replace(ended, stop=stop)


def compile_step(
    setup: TrainSetup, make: Callable[[], TrainState], start: int | None = None
) -> tuple[StepFn, TrainState]:
    """Return the compiled step, and the state that `make` makes during compilation.

    Args:
        start: the step that the run resumes from, whose batch is checked.

    Raises:
        UserError: for what is wrong with the loss, or with the first batch that it gets.
    """
    looked = trace_train_batch(
        setup, start or 0
    )  # traced here, where a caller's `with jax...` holds
    with ThreadPoolExecutor(1) as beside:
        state, checked = beside.submit(make), beside.submit(setup.check_evaluation)
        others = beside.submit(_searched, setup, looked)
        with HEARTBEAT.during("compile"):
            step = setup.compile_step()
        with HEARTBEAT.during("restore"):
            made = state.result()
        checked.result()
        check_batches(setup, others.result(), made)
        return step, made


def _searched(setup: TrainSetup, looked: Sequence[FirstBatch]) -> list[FirstBatch]:
    """These and the first batches of the sets, each searched."""
    found = [*looked, *trace_set_batches(setup)]
    return [each for each in found if each.suspects is not None]


def make_reader(
    setup: TrainSetup, start: int, saw: Callable[[int, Batch], None] | None = None
) -> ReadAhead:
    """Return the reader of the batches of each call, from step `start` on.

    Args:
        saw: called with the number and the batch of each call when it is read.
    """
    each = setup.config.steps_per_call
    start, stop = start // each, setup.config.steps // each
    calls = setup.calls_from(start, stop)

    def read(call: int) -> Batch:
        batch = calls(call)
        if saw:
            saw(call, batch)
        return setup.place(batch)

    return ReadAhead(read, start=start, stop=stop, close=calls.close)


def _blame(setup: TrainSetup, last: int) -> str:
    """Describe values of the data that are not finite and may be why the loss is not."""
    window = getattr(setup.config.guard, "window", 0)  # the steps that the verdict is about
    recent = (
        min(window, setup.config.steps) + 10 * setup.config.steps_per_call
    )  # some were in flight
    rows_of = lambda step: step_report(setup, step).get("rows", ())
    return describe_nonfinite(setup.train, range(max(1, last - recent), last + 1), rows_of)
