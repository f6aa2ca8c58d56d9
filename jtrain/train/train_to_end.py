"""Training of a run to its end, in a directory or in memory: steps, rollbacks, the last save."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jtrain.core.loop import Hook, LoopResult, Rollback, Stop, StoppedError
from jtrain.core.state import TrainState
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import barrier
from jtrain.distributed.watchdog import StartupProgress
from jtrain.errors import ConfigError, UserError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.regular_files import open_regular
from jtrain.train.code_digest import digest_code
from jtrain.train.compile_step import record_compile
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import EvaluationResult, Results
from jtrain.train.hooks.function_hooks import Observer, to_hook
from jtrain.train.hooks.log import LogLines, MetricHistory
from jtrain.train.hooks.signals import Signals
from jtrain.train.rollback import decide_rollback
from jtrain.train.run_dir import get_environment
from jtrain.train.run_hooks import RunHooks, open_hooks
from jtrain.train.run_result import Status
from jtrain.train.run_steps import run_steps
from jtrain.train.run_store import DirectoryStore, MemoryStore, RunStore, StartedRun
from jtrain.train.runtime import pause_collection
from jtrain.train.setup import TrainSetup
from jtrain.train.step_time import set_up_with_step_time

_STATUS: Mapping[str, Status] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """End of a run: its status and last state, and what was measured."""

    setup: TrainSetup
    status: Status
    why: str
    """Why it ended before its last step, or failed."""
    ended: LoopResult[TrainState]
    checkpoint: int | None
    """Step of the newest checkpoint."""
    results: Mapping[str, Results]
    """Metrics by set and step of evaluation."""
    best: EvaluationResult | None
    """Best evaluation, if a best is retained."""
    history: MetricHistory
    """Metrics in memory, of a run that has no directory."""
    sample: str
    """Text that the experiment sampled; empty if there is none."""


def start_run(
    config: RunConfig, store: RunStore, screen: TextIO | None, hooks: Sequence[Observer] = ()
) -> StartedRun:
    """Set up a config, compile its step, and return where its run starts.

    Args:
        screen: stream that shows what takes long; standard output by default.
        hooks: observers of the caller, beside those of the config.

    Raises:
        UserError: for what is wrong with config, data or disk, or if one of `hooks` is no hook.
    """
    if isinstance(hooks, Hook) or callable(hooks):
        raise ConfigError("hooks= takes a list, and one hook was given: write hooks=[it]")
    own = [to_hook(hook, steps_per_call=config.steps_divisor) for hook in hooks]
    show = functools.partial(print, file=screen, flush=True)
    is_shown = store.run_dir is None or store.run_dir.first
    with pause_collection(), StartupProgress(show) if is_shown else contextlib.nullcontext():
        return store.start(set_up_with_step_time(config, store.pace, own))


def train_to_end(
    store: RunStore,
    started: StartedRun,
    signals: Signals,
    *,
    screen: TextIO | None = None,
    notices: Sequence[str] = (),
) -> TrainedRun:
    """Train a run until it ends, resuming after each rollback.

    Args:
        screen: stream to print to; standard output by default.
        notices: lines to log after the banner.
    """
    resume, step, state = started
    facts = _run_facts(resume.setup)
    with _record_crash(store, screen):
        if store.run_dir is not None and store.run_dir.first:
            with contextlib.suppress(UserError, OSError):  # the run does not need the file
                record_compile(store.run_dir.compiles, resume.setup, resume.start or 0)
        while True:
            with open_hooks(resume, state, store, signals, screen=screen) as run_hooks:
                if isinstance(store, DirectoryStore):
                    store.write_running(resume, facts)
                at = store.run_dir and store.run_dir.path
                ended = run_steps(resume, step, state, run_hooks, signals, notices, at)
                if isinstance(store, MemoryStore) or not isinstance(ended.stop, Rollback):
                    return _finish(store, resume.setup, run_hooks, signals, ended)
                run_hooks.end_tracking("stopped")
                line = decide_rollback(resume.setup, run_hooks.checks.policy, ended.stop)
            del state, ended  # frees memory for the next state
            resume, state, passed_over = store.restart(resume.setup)
            notices = [line, *passed_over]


def _run_facts(setup: TrainSetup) -> dict[str, Any]:
    """Return the facts about a run that run.json has beside its status."""
    facts = {"sets": list(setup.sets), "data": setup.data, **get_environment(setup.devices)}
    facts |= {"layout": dict(setup.strategy.axes), "shards": setup.strategy.shares}
    facts |= {"steps": setup.config.steps, "code": digest_code(setup.config.code_root())}
    if setup.experiment.tokenizer:
        facts["tokenizer"] = setup.experiment.tokenizer
    if setup.lengths.seconds:
        facts["seconds_per_step"] = setup.lengths.seconds
    return facts


@contextlib.contextmanager
def _record_crash(store: RunStore, screen: TextIO | None) -> Iterator[None]:
    """Record an error that ends the block as status `crashed`; a kill leaves `running`."""
    if isinstance(store, MemoryStore):
        yield
        return
    run_dir = store.run_dir
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        show = functools.partial(print, file=screen, flush=True)
        lines = LogLines(run_dir.log if run_dir.path.is_dir() else None, screen=show)
        lines.write(f"ended by an error: {why}")
        if run_dir.first:
            try:
                store.checkpoints.wait()  # so that a save in progress is recorded
            except Exception as second:
                lines.print(f"and a save has failed: {second}")
            with contextlib.suppress(OSError):  # a full disk, which may be what ends it
                run_dir.write_status("crashed", why=why.partition("\n")[0])
        raise


def _finish(
    store: RunStore,
    setup: TrainSetup,
    hooks: RunHooks,
    signals: Signals,
    ended: LoopResult[TrainState],
) -> TrainedRun:
    """Evaluate and save the last state, record the status, and write sample and pictures."""
    stop, sample = ended.stop or Stop("", "finished"), ""
    save = hooks.saving.every
    try:
        if stop.kind == "finished":
            for evaluation in hooks.evaluations.values():
                evaluation.at(ended.step, ended.state)
        save.at(ended.step, ended.state)
        if stop.kind == "finished":
            sample = _show_sample(store, setup, hooks, signals, ended)
    except StoppedError as asked:  # all steps are taken; the rest follows when the run resumes
        stop = asked.stop
        save.at(ended.step, ended.state)
    with HEARTBEAT.during("save"):
        hooks.saving.settle(ended.step, ended.state)  # whatever was announced is on the disk
    status, why, checkpoint = _STATUS[stop.kind], stop.why, None
    if isinstance(store, DirectoryStore):
        store.run_dir.write_status(status, step=ended.step, why=why)
    hooks.end_tracking(status)
    # One process that exits may end all, and the first has more to do. A missing one is ignored.
    with HEARTBEAT.during("end"), contextlib.suppress(RuntimeError, ValueError):
        barrier()
    if isinstance(store, DirectoryStore):
        checkpoint = store.finish()
    return TrainedRun(
        setup=setup,
        status=status,
        why=why,
        ended=ended,
        checkpoint=checkpoint,
        results={name: evaluation.results for name, evaluation in hooks.evaluations.items()},
        best=hooks.best and hooks.best.best,
        history=hooks.measures.history,
        sample=sample,
    )


def _show_sample(
    store: RunStore,
    setup: TrainSetup,
    hooks: RunHooks,
    signals: Signals,
    ended: LoopResult[TrainState],
) -> str:
    """Write the sample and draw the pictures; return the sample, empty if there is none."""
    sample, run_dir, text = setup.experiment.sample, store.run_dir, ""
    if run_dir is None:
        return text
    if sample is not None:
        with hooks.measures.pause("sampling"), signals.interruptible():
            weights_and_key = setup.gather_weights(ended.state)
            text = sample(*weights_and_key) if run_dir.first else ""
            barrier()
        if run_dir.first:
            _write_sample(run_dir.samples, text, hooks.measures.lines)
    if hooks.pictures is not None:
        with signals.interruptible():
            hooks.pictures.at(ended.step, ended.state)
    return text


def _write_sample(path: Path, text: str, lines: LogLines) -> None:
    """Write the sample; a failure is logged, and the run is done all the same."""
    try:
        with open_regular(path, "wb") as file:
            file.write(f"{text}\n".encode("utf-8", "replace"))
    except OSError as error:
        advice = disk_advice(error, path).words
        lines.print(f"the sample could not be written to {path} ({error.strerror}). {advice}.")
