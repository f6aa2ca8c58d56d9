"""Steps of a run: the banner, the compiled step and its hooks, and why the run stopped."""

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.config.dump import flatten
from jtrain.core.loop import LoopResult, Stop, StoppedError, train_loop
from jtrain.core.pytree import num_elements
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.data.batches.scan import describe_nonfinite
from jtrain.distributed.accelerators import unused_accelerators
from jtrain.distributed.cpu_threads import count_cpu_devices, describe_small_pool, pool_advice
from jtrain.distributed.multihost import all_gather
from jtrain.distributed.watchdog import DeadlockWatch
from jtrain.io.formatting import format_seconds
from jtrain.models.pretrained.source import describe_source
from jtrain.parallel.devices import parse_devices
from jtrain.train.bad_step_policy import BadStepPolicy
from jtrain.train.bad_steps import describe_bad_step, step_report
from jtrain.train.hooks.signals import Signals
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_hooks import RunHooks
from jtrain.train.runtime import explain_leaked_tracer
from jtrain.train.setup import TrainSetup
from jtrain.train.summary import format_line, summarize


def run_steps(
    resume: ResumePoint,
    step: StepFn,
    state: TrainState,
    hooks: RunHooks,
    signals: Signals,
    notices: Sequence[str] = (),
    directory: Path | None = None,
) -> LoopResult[TrainState]:
    """Train from `state` on; return the last state, and why it stopped early if it did.

    Args:
        directory: of the run, if it has one.
        notices: lines to log after the banner.
    """
    setup, start = resume.setup, resume.start
    with _deadlock_watch(setup), hooks.checks.feed as feed:
        for line in [*banner_lines(setup, start), *notices]:
            hooks.measures.lines.print(line)
        try:
            hooks.catch_up(start, state)
        except StoppedError as asked:
            return LoopResult(state, start or 0, asked.stop)
        already_over = hooks.verdict()
        try:
            ended = _find_loop(setup, directory, hooks)(
                hooks.checks.recompute.wrap(step) if hooks.checks.recompute else step,
                state,
                signals.through(feed),
                start=start or 0,
                stop=start if start and already_over else setup.config.steps,
                hooks=hooks.ordered,
                steps_per_call=setup.steps_per_call,
                **({"in_flight": setup.schedule.in_flight} if setup.schedule.varies else {}),
            )
        except TypeError as error:
            explained = explain_leaked_tracer(error, setup.experiment.loss)
            if explained is None:
                raise
            raise explained from error
    hooks.checks.policy.ended(ended.step)
    stop = ended.stop or (already_over if start else None)
    if stop is not None and stop.kind == "failed":
        stop = _explain_failure(setup, hooks.checks.policy, ended, stop)
    return dataclasses.replace(ended, stop=stop)


def _deadlock_watch(setup: TrainSetup) -> contextlib.AbstractContextManager[None]:
    """Return a watch over several CPU devices of one process; those of several wait for peers."""
    devices = count_cpu_devices(setup.devices)
    alone = jax.process_count() == 1 and devices > 1
    return DeadlockWatch(pool_advice(devices)) if alone else contextlib.nullcontext()


def _find_loop(
    setup: TrainSetup, directory: Path | None, hooks: RunHooks
) -> Callable[..., LoopResult[TrainState]]:
    """Return the loop of the strategy, by its address, for it may need what is built on a run."""
    loop = pkgutil.resolve_name(setup.strategy.loop)
    if loop is train_loop:
        return train_loop
    return functools.partial(loop, setup=setup, directory=directory, log=hooks.measures.lines.print)


def _explain_failure(
    setup: TrainSetup, policy: BadStepPolicy, ended: LoopResult[TrainState], stop: Stop
) -> Stop:
    """Return the `Stop` of a failed run, with the data and the leaf that explain it."""
    bad, blame = policy.bad, _describe_bad_data(setup, ended.step)
    if bad:  # in every process, each of which has read rows of its own
        first = next((each for each in all_gather(blame) if "every value" not in each), blame)
        calls = setup.schedule.in_flight
        late = f"The numbers of a step are read up to {calls} calls late: it was found at "
        found = f"{late}step {ended.step}. " if ended.step > bad.step else ""
        blame = f"{found}{first} {describe_bad_step(setup, ended.state, bad, ended.step)}"
    why = f"{stop.why} {blame}"
    if bad:
        policy.record(bad, "stopped", why=why)
    return dataclasses.replace(stop, why=why)


def _describe_bad_data(setup: TrainSetup, last: int) -> str:
    """Describe values of the recent data that are not finite, and may be why the loss is not."""
    window = getattr(setup.config.guard, "window", 0)  # the steps that the verdict is about
    in_flight = 10 * setup.schedule.most
    recent = min(window, setup.config.steps) + in_flight
    rows_of = lambda step: step_report(setup, step).get("rows", ())
    return describe_nonfinite(setup.train, range(max(1, last - recent), last + 1), rows_of)


def banner_lines(setup: TrainSetup, start: int | None, root: Path = Path("/")) -> list[str]:
    """Return the lines to log before the first step.

    Args:
        root: of the file system that shows the machine's accelerators.
    """
    config, strategy = setup.config, setup.strategy
    count = num_elements(setup.like.params)
    batch: Any = f"{config.batch} rows"
    if setup.experiment.tokens:
        batch = f"{batch} of {setup.experiment.tokens} tokens"
    microbatches = f"{config.microbatches} microbatch{'es' * (config.microbatches > 1)}"
    lines = [
        f"{config.name}: {count:,} parameters, {describe_layout(setup)}, {batch} a step in "
        f"{strategy.shares} shard{'s' * (strategy.shares > 1)}, {microbatches}",
        *_unused(setup, root),
        *describe_small_pool(count_cpu_devices(setup.devices)),
        *([setup.why] if setup.why else []),
        *([setup.schedule.why] if setup.schedule.why else []),
        format_line(summarize(setup.like)),
        *([str(strategy.schedule)] if strategy.schedule else []),
    ]
    if jax.process_count() > 1:
        lines.append(_sharding(setup))
    steps = flatten(setup.config)
    for key, duration in setup.lengths.written.items():
        default = duration.unit == "%" and config.experiment == "fit"  # jt.fit sets shares
        if isinstance(steps.get(key), int) and not default:
            unit = "evaluations" if key == "evaluate.patience" else "steps"
            if duration.seconds and unit == "steps":
                unit += f" of {format_seconds(setup.lengths.seconds)}"
            lines.append(f"{key}: {duration} is {steps[key]} {unit}")
    if not start:
        lines += describe_source(getattr(config, "model", None))
    if start:
        lines.append(f"resumes from step {start} of {config.steps}")
    return lines


def _unused(setup: TrainSetup, root: Path) -> list[str]:
    """Return lines about unused accelerators, unless the config chooses a platform."""
    if parse_devices(setup.config.parallel.devices).platform:
        return []
    used = {device.platform for device in jax.devices()}
    return unused_accelerators(used, getattr(jax.config, "jax_platforms", None), root=root)


def describe_layout(setup: TrainSetup) -> str:
    """Return the kind of a layout, its devices and its axes.

    `sharded over 8 cpu devices (fsdp 4 x tensor 2)`.
    """
    devices, kind = setup.devices, setup.config.parallel.kind
    sizes = [f"{axis} {size}" for axis, size in setup.strategy.axes.items()]
    axes = f" ({' x '.join(sizes)})" if len(sizes) > 1 else ""
    plural = "s" * (len(devices) > 1)
    return f"{kind} over {len(devices)} {devices[0].device_kind} device{plural}{axes}"


def _sharding(setup: TrainSetup) -> str:
    """Return a line about the rows that each process reads."""
    index, count = setup.strategy.part
    by_index = f"data: by index, this process reads part {index} of {count} of every batch's rows"
    return getattr(setup.own_rows(setup.experiment.train), "summary", by_index)
