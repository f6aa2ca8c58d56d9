"""`jt.run`: train a config in its directory, or resume the run there."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import jax

from jtrain.checkpoint import CheckpointManager, SetAsideError
from jtrain.checkpoint.object_store_copy import ObjectStoreCopy
from jtrain.core.loop import LoopResult, Rollback, Stop, StoppedError
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.data.batches.reader_counts import add_readers
from jtrain.distributed.cluster.command_line import program
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.heartbeat.startup_progress import StartupProgress
from jtrain.distributed.heartbeat.watchdog import Watchdog
from jtrain.distributed.multihost import barrier, broadcast_from_first
from jtrain.errors.user_code import api_boundary
from jtrain.io.disk_errors import disk_advice
from jtrain.io.private_files import private_files
from jtrain.io.regular_files import open_regular
from jtrain.train.compilation_cache import enable_compilation_cache
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import Results
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.hooks.log import LogLines
from jtrain.train.hooks.metrics import read_results
from jtrain.train.hooks.signals import Signals
from jtrain.train.longer_run import (
    check_rate,
    check_steps,
    describe_length_change,
    get_lengths,
    get_stored_lengths,
    keep_lengths,
)
from jtrain.train.multihost_checks import check_shared_directory, join_run
from jtrain.train.remote_run import copy_finished, fetch_for_all, make_mirror
from jtrain.train.resume_notes import describe_copy, describe_missing_checkpoint, resume_advice
from jtrain.train.rollback import ResumePoint, decide_rollback, resume_point
from jtrain.train.run_config_check import check_about
from jtrain.train.run_dir import RunDir, get_environment
from jtrain.train.run_hooks import RunHooks
from jtrain.train.setup import TrainSetup
from jtrain.train.step_time import paced
from jtrain.train.trackers import check_installed
from jtrain.train.train_loop import compile_step, run_steps

Status: TypeAlias = Literal["done", "stopped", "failed"]
ENDS: Mapping[str, Status] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run."""

    directory: RunDir
    status: Status
    step: int
    """Last step that it took."""
    checkpoint: int | None
    """Step of the newest checkpoint; `run` resumes from it. None: there is none."""
    why: str
    sets: Mapping[str, Results]
    """Metrics by set and step of evaluation; the main set first."""
    sample: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the last step; empty where this call took no step."""
    lost: Sequence[str] = ()
    """Files of the run that were removed or truncated by others; a complete run fails for it."""

    @property
    def results(self) -> Results:
        """Metrics of the main set by step; empty if there is no set."""
        return next(iter(self.sets.values()), {})


@api_boundary
@private_files()
def run(
    config: RunConfig,
    *,
    source: Path | None = None,
    hooks: Sequence[Observer] = (),
    screen: TextIO | None = None,
    directory: Path | None = None,
    again: str = "",
) -> RunResult:
    """Train `config` in runs/NAME, or resume that run.

    A finished run is trained longer where the config has more steps than it took.

    Args:
        source: the file the config was read from, for advice.
        hooks: observers of your own, beside those of the config; plain functions too, by the names
            of what they take: (step, numbers), (step, state) or (step, results).
        screen: stream to print to; standard output by default.
        directory: of the run, where it is not runs/NAME.
        again: how to resume the run, for messages; by default `jtrain run runs/NAME/config.yaml`,
            or this call where `directory` is given.

    Raises:
        UserError: for what is wrong with config, data or disk, before anything is trained.
        PeerError: if another process of the run does not come.
    """
    enable_compilation_cache()
    config = config if config.name else dataclasses.replace(config, name=config.experiment)
    path = directory or Path("runs") / config.name
    again = again or ("the same call of jt.run again" if directory else "")
    HEARTBEAT.begin_run(path, config.checkpoint.grace)
    cluster = join_run(config, path)
    run_dir = RunDir(path, again, cluster.index)
    other_run = f"name={config.name}-2"
    other_run = other_run if again else f"{program()} run {source or 'CONFIG'} ... {other_run}"
    fetched = fetch_for_all(config, run_dir, cluster.processes)
    advice_of = functools.partial(resume_advice, run_dir, config, other_run, again)
    stored = run_dir.stored(type(config))
    config = keep_lengths(config, stored)
    changed = run_dir.check_config(config, advice_of, also=get_lengths(config))
    finished, again_for = _finished_result(run_dir, config, stored, cluster.processes)
    if finished:
        copy_finished(config, run_dir, finished.step)
        return finished
    run_dir.check_files()
    changed += describe_copy(run_dir, identity := _of_first(run_dir.identify, cluster.processes))
    owner = run_dir.adopt(identity, config)
    check_installed(config.trackers)
    checkpointing = config.checkpoint
    with (
        Watchdog(path, cluster.index),
        Signals(every=config.steps_per_call, grace=checkpointing.grace) as signals,
        CheckpointManager(
            run_dir.checkpoints,
            keep=checkpointing.keep,
            best=checkpointing.best,
            first=run_dir.first,
            fall_back=checkpointing.on_damage == "fall_back",
            lost=run_dir.lost,
            owner=owner,
        ) as checkpoints,
    ):
        checkpoints.acquire()  # an error if another process writes there, before any data is read
        tell: Callable[[str], None] = functools.partial(print, file=screen, flush=True)
        with StartupProgress(tell) if run_dir.first else contextlib.nullcontext():
            setup = paced(config, run_dir.pace)
            checkpoints.prepare()  # during compilation; it needs devices, which are initialised now
            run_dir.check_tokenizer(setup.experiment.tokenizer)
            run_dir.check_data(setup.data, other_run)
            checkpoints.check_room(setup.like)
            resume, step, state = _resume(config, setup, run_dir, checkpoints, other_run)
        setup, start = resume.setup, resume.start
        again_for += describe_missing_checkpoint(run_dir, checkpoints, start)
        # A resumed run has all in its checkpoint, wherever its first parameters came from.
        drawn = setup.begins.lines() if start is None and setup.begins else []
        run_dir.begin(config)
        check_shared_directory(run_dir)
        mirror = make_mirror(config, run_dir, checkpoints)
        longer = [change for change in resume.extended if change.step == start]
        extensions = [
            line for change in longer for line in describe_length_change(setup.config, change)
        ]
        notices = [
            *cluster.describe(),
            *fetched,
            *again_for,
            *checkpoints.notices,
            *drawn,
            *changed,
            *extensions,
        ]
        with _record_crash(run_dir, checkpoints, tell):
            return _train(
                resume,
                step,
                state,
                run_dir,
                checkpoints,
                signals,
                hooks=hooks,
                screen=screen,
                facts=_facts(setup),
                notices=notices,
                mirror=mirror,
            )


def _facts(setup: TrainSetup) -> dict[str, Any]:
    """Return what run.json says of a run beside its status."""
    facts = {"sets": list(setup.sets), "data": setup.data, **get_environment(setup.devices)}
    facts |= {"layout": dict(setup.strategy.axes), "shards": setup.strategy.shares}
    facts["steps"] = setup.config.steps
    if setup.experiment.tokenizer:
        facts["tokenizer"] = setup.experiment.tokenizer
    if setup.lengths.seconds:
        facts["seconds_per_step"] = setup.lengths.seconds
    return facts


def _train(
    resume: ResumePoint,
    step: StepFn,
    state: TrainState,
    run_dir: RunDir,
    checkpoints: CheckpointManager,
    signals: Signals,
    *,
    hooks: Sequence[Observer],
    screen: TextIO | None,
    facts: Mapping[str, Any],
    notices: Sequence[str],
    mirror: ObjectStoreCopy | None,
) -> RunResult:
    """Train to the end, resuming after each rollback."""
    while True:
        setup, start = resume.setup, resume.start
        run_dir.check_rows(resume.rows, start or 0)
        before: dict[str, Any] = {
            "earlier": resume.earlier,
            "known": resume.known,
            "extended": resume.extended,
        }
        if mirror is not None:
            before["copy"] = mirror.copy
        with RunHooks(
            setup, run_dir, checkpoints, start=start, screen=screen, **before
        ) as run_hooks:
            if run_dir.first:
                readers = add_readers(run_dir.facts(), start or 0, jax.process_count())
                run_dir.write_status("running", step=start or 0, why="", readers=readers, **facts)
            ended = run_steps(
                setup, step, state, run_hooks, signals, hooks=hooks, start=start, notices=notices
            )
            if not isinstance(ended.stop, Rollback):
                outcome = _finish(setup, run_dir, checkpoints, run_hooks, signals, ended)
                if mirror is not None:
                    mirror.finish(outcome.checkpoint)
                return outcome
            run_hooks.ended("stopped")
            notices = [decide_rollback(setup, run_hooks.guarded, ended.stop)]
        del state, ended  # frees memory for the next state
        checkpoints.wait()
        known = len(checkpoints.notices)
        with HEARTBEAT.during("restore"):
            resume = resume_point(setup, run_dir, checkpoints)
            state = _state(resume, checkpoints)
        notices += checkpoints.notices[known:]  # of checkpoints that the rollback passed over


@contextlib.contextmanager
def _record_crash(
    run_dir: RunDir, checkpoints: CheckpointManager, tell: Callable[[str], None]
) -> Iterator[None]:
    """Record an error that ends the block as status `crashed`; a kill leaves `running`."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        lines = LogLines(run_dir.log if run_dir.is_in_place else None, screen=tell)
        lines.write(f"ended by an error: {why}")
        if run_dir.first:
            try:
                checkpoints.wait()  # so that a save in progress is recorded
            except Exception as second:
                lines.print(f"and a save has failed: {second}")
            with contextlib.suppress(OSError):  # a full disk, which may be what ends it
                run_dir.write_status("crashed", why=why.partition("\n")[0])
        raise


def _finished_result(
    run_dir: RunDir, config: RunConfig, stored: RunConfig | None, processes: int
) -> tuple[RunResult | None, list[str]]:
    """Return the result of a run that is finished, or a line that says why it must resume."""
    facts_before = run_dir.facts()
    if facts_before.get("status") != "done" or (stored and _goes_further(config, stored)):
        return None, []
    step, owner = facts_before.get("step"), run_dir.owner()
    checkpoints = CheckpointManager(run_dir.checkpoints, first=run_dir.first, owner=owner)
    checkpoints.remove_leftovers()

    def look() -> dict[str, str]:
        steps = config.steps if isinstance(config.steps, int) else facts_before.get("steps", step)
        if step != steps and not facts_before.get("why"):
            return {"not": f"of {steps}, and nothing says why it should have ended there"}
        if step is None or not checkpoints.is_valid(step):
            return {"not": "of which the checkpoint is damaged or gone"}
        run_dir.check_rows(checkpoints.about(step).get("rows", {}), step)
        return {"not": "and has lost rows since" if run_dir.lost.found else ""}

    wrong = _of_first(look, processes)["not"]
    if step is None or wrong:
        return None, [f"was done at step {step}, {wrong}"]
    results_by_set = {
        name: read_results(run_dir.metrics, name) for name in facts_before.get("sets", ["valid"])
    }
    return RunResult(run_dir, "done", step, step, "it was finished before", results_by_set), []


def _of_first(make: Callable[[], dict[str, Any]], processes: int) -> dict[str, Any]:
    """Return what the first process makes; a single process does not initialise JAX for it."""
    return broadcast_from_first(make) if processes > 1 else make()


def _goes_further(config: RunConfig, stored: RunConfig) -> bool:
    """Return whether a run that was finished as `stored` may have more to do."""
    patience = config.evaluate.patience != stored.evaluate.patience
    return patience or get_lengths(config) != get_stored_lengths(config, stored)


def _resume(
    config: RunConfig,
    setup: TrainSetup,
    run_dir: RunDir,
    checkpoints: CheckpointManager,
    other_run: str,
) -> tuple[ResumePoint, StepFn, TrainState]:
    """Return where a run starts, its compiled step, and the state of a valid checkpoint."""
    check_rate(setup.config)
    while True:
        with HEARTBEAT.during("restore"):  # every byte of a checkpoint is read
            resume = resume_point(setup, run_dir, checkpoints)
        if resume.start is not None:
            about = checkpoints.about(resume.start)
            where, disk_advice = (
                run_dir.checkpoints / str(resume.start),
                f"Start a new run: {other_run}",
            )
            check_about(about, config, where, disk_advice, also=get_lengths(config))
            run_dir.check_data(setup.data, other_run, known=about.get("data"))
        check_steps(setup.config, resume.start or 0, run_dir.path, other_run)
        make = functools.partial(_state, resume, checkpoints)
        with contextlib.suppress(SetAsideError):  # its arrays are not what was saved: one before it
            return resume, *compile_step(resume.setup, make, resume.start)


def _state(resume: ResumePoint, checkpoints: CheckpointManager) -> TrainState:
    """Return the state that a run starts from."""
    setup = resume.setup
    if resume.start is None:
        return setup.fresh()
    return checkpoints.restore(resume.start, setup.like)


def _finish(
    setup: TrainSetup,
    run_dir: RunDir,
    checkpoints: CheckpointManager,
    run_hooks: RunHooks,
    signals: Signals,
    ended: LoopResult[TrainState],
) -> RunResult:
    """Save the last state, record the status, and write sample and pictures."""
    stop, sample = ended.stop or Stop("", "finished"), ""
    try:
        for evaluation in run_hooks.evaluations.values() if stop.kind == "finished" else ():
            evaluation.at(ended.step, ended.state)
        run_hooks.save.at(ended.step, ended.state)
        if stop.kind == "finished":
            sample = _show_sample(setup, run_dir, run_hooks, signals, ended)
    except StoppedError as asked:  # all steps are taken; the rest follows at the next start
        stop = asked.stop
        run_hooks.save.at(ended.step, ended.state)
    with HEARTBEAT.during("save"):
        run_hooks.settle(ended.step, ended.state)  # whatever was announced is on the disk
    status, why = ENDS[stop.kind], stop.why
    if status == "done" and run_dir.lost.found:
        status, why = "failed", run_dir.lost.why
    run_dir.write_status(status, step=ended.step, why=why)
    run_hooks.ended(status)
    # One process that exits may end all, and the first has more to do. A missing one is ignored.
    with HEARTBEAT.during("end"), contextlib.suppress(RuntimeError, ValueError):
        barrier()
    results_by_set = {
        name: evaluation.results for name, evaluation in run_hooks.evaluations.items()
    }
    lost = tuple(run_dir.lost.found)
    return RunResult(
        run_dir,
        status,
        ended.step,
        checkpoints.newest(),
        why,
        results_by_set,
        sample,
        ended.numbers,
        lost,
    )


def _write_sample(path: Path, text: str, run_hooks: RunHooks) -> None:
    """Write the sample; a failure is logged, and the run is done all the same."""
    try:
        with open_regular(path, "wb") as file:
            file.write(f"{text}\n".encode("utf-8", "replace"))
    except OSError as error:
        todo = disk_advice(error, path).words
        run_hooks.lines.print(
            f"the sample could not be written to {path} ({error.strerror}). {todo}."
        )


def _show_sample(
    setup: TrainSetup,
    run_dir: RunDir,
    run_hooks: RunHooks,
    signals: Signals,
    ended: LoopResult[TrainState],
) -> str:
    """Write the sample and draw the pictures; return the sample, empty if there is none."""
    sample = setup.experiment.sample
    text = ""
    if sample is not None:
        with run_hooks.pause("sampling"), signals.interruptible():
            here = setup.here(ended.state)
            text = sample(*here) if run_dir.first else ""
            barrier()
        if run_dir.first:
            _write_sample(run_dir.samples, text, run_hooks)
    if run_hooks.pictures is not None:
        with signals.interruptible():
            run_hooks.pictures.at(ended.step, ended.state)
    return text
