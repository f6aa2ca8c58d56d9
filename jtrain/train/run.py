"""Wire an experiment into a run: the one module that sees all of the above."""

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
from jtrain.data.batches.reader_counts import gone_on
from jtrain.distributed.cluster.command_line import program
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.heartbeat.startup_progress import StartupProgress
from jtrain.distributed.heartbeat.watchdog import Watchdog
from jtrain.distributed.multihost import barrier, broadcast_from_first
from jtrain.errors.user_code import api_boundary
from jtrain.io.disk_errors import disk_advice
from jtrain.io.private_files import private_files
from jtrain.io.regular_files import open_regular
from jtrain.train.compilation_cache import keep_compiled_programs
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import Results
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.hooks.log import LogLines
from jtrain.train.hooks.metrics import results
from jtrain.train.hooks.signals import Signals
from jtrain.train.longer_run import (
    check_rate,
    check_steps,
    describe,
    keep_lengths,
    lengths,
    stored_lengths,
)
from jtrain.train.multihost_checks import join, refuse_unshared
from jtrain.train.remote_run import copy_finished, fetch_for_all, make_mirror
from jtrain.train.resume_notes import copied, gone, ways_out
from jtrain.train.rollback import ResumePoint, decide_rollback, resume_point
from jtrain.train.run_config_check import check_about
from jtrain.train.run_dir import RunDir, environment
from jtrain.train.run_hooks import RunHooks
from jtrain.train.setup import TrainSetup
from jtrain.train.step_time import paced
from jtrain.train.trackers import check_installed
from jtrain.train.train_loop import compile_step, run_steps

Status: TypeAlias = Literal["done", "stopped", "failed"]
ENDS: Mapping[str, Status] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    directory: RunDir
    status: Status
    step: int
    """The last that it took."""
    kept: int | None
    """That of the newest checkpoint, from which it goes on; None: there is none."""
    why: str
    sets: Mapping[str, Results]
    """Of each set, the first first, and each step at which it was evaluated the numbers."""
    sample: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The metrics of the last step; none where this call took no step."""
    lost: Sequence[str] = ()
    """What others removed or cut of its files; a run that has taken all its steps fails by it."""

    @property
    def results(self) -> Results:
        """Those of the first set; none if there is no set."""
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
    """Trains `config` in runs/NAME, or goes on where that run was stopped.

    With more steps than a finished run has taken, it is trained longer.

    Args:
        source: the file the config was read from, for advice.
        hooks: observers of your own, beside those of the config; plain functions too, by the names
            of what they take: (step, numbers), (step, state) or (step, results).
        screen: where it is told; standard output by default.
        directory: of the run, where it is not runs/NAME.
        again: what to do to go on with it; by default `jtrain run runs/NAME/config.yaml`, or where
            `directory` is given, this call.

    Raises:
        UserError: for what config, data or disk do not allow; then nothing was trained.
        PeerError: if another process of the run does not come.
    """
    keep_compiled_programs()
    config = config if config.name else dataclasses.replace(config, name=config.experiment)
    path = directory or Path("runs") / config.name
    again = again or ("the same call of jt.run again" if directory else "")
    HEARTBEAT.begins(path, config.checkpoint.grace)
    cluster = join(config, path)
    there = RunDir(path, again, cluster.index)
    another = f"name={config.name}-2"
    another = another if again else f"{program()} run {source or 'CONFIG'} ... {another}"
    fetched = fetch_for_all(config, there, cluster.processes)
    advice_of = functools.partial(ways_out, there, config, another, again)
    stored = there.stored(type(config))
    config = keep_lengths(config, stored)
    changed = there.refuse_another(config, advice_of, also=lengths(config))
    finished, again_for = _finished(there, config, stored, cluster.processes)
    if finished:
        copy_finished(config, there, finished.step)
        return finished
    there.check_files()
    changed += copied(there, identity := _of_first(there.identify, cluster.processes))
    owner = there.adopt(identity, config)
    check_installed(config.trackers)
    kept = config.checkpoint
    with (
        Watchdog(path, cluster.index),
        Signals(every=config.steps_per_call, grace=kept.grace) as signals,
        CheckpointManager(
            there.checkpoints,
            keep=kept.keep,
            best=kept.best,
            first=there.first,
            fall_back=kept.on_damage == "fall_back",
            lost=there.lost,
            owner=owner,
        ) as checkpoints,
    ):
        checkpoints.take()  # or it is refused, before any data is read
        tell: Callable[[str], None] = functools.partial(print, file=screen, flush=True)
        with StartupProgress(tell) if there.first else contextlib.nullcontext():
            parts = paced(config, there.pace)
            checkpoints.prepare()  # beside the compiler; it asks for devices, which are settled now
            there.refuse_another_tokenizer(parts.experiment.tokenizer)
            there.refuse_other_data(parts.data, another)
            checkpoints.check_room(parts.like)
            begin, step, state = _begun(config, parts, there, checkpoints, another)
        parts, start = begin.parts, begin.start
        again_for += gone(there, checkpoints, start)
        # A run that goes on has all in its checkpoint, wherever its first parameters came from.
        drawn = parts.begins.lines() if start is None and parts.begins else []
        there.begin(config)
        refuse_unshared(there)
        mirror = make_mirror(config, there, checkpoints)
        longer = [change for change in begin.extended if change.step == start]
        told = [line for change in longer for line in describe(parts.config, change)]
        news = [*cluster.news(), *fetched, *again_for, *checkpoints.news, *drawn, *changed, *told]
        with _crashes(there, checkpoints, tell):
            return _trained(
                begin,
                step,
                state,
                there,
                checkpoints,
                signals,
                hooks=hooks,
                screen=screen,
                facts=_facts(parts),
                news=news,
                mirror=mirror,
            )


def _facts(parts: TrainSetup) -> dict[str, Any]:
    """Return what run.json says of a run beside its status."""
    facts = {"sets": list(parts.sets), "data": parts.data, **environment(parts.devices)}
    facts |= {"layout": dict(parts.strategy.axes), "shards": parts.strategy.shares}
    facts["steps"] = parts.config.steps
    if parts.experiment.tokenizer:
        facts["tokenizer"] = parts.experiment.tokenizer
    if parts.lengths.seconds:
        facts["seconds_per_step"] = parts.lengths.seconds
    return facts


def _trained(
    begin: ResumePoint,
    step: StepFn,
    state: TrainState,
    there: RunDir,
    checkpoints: CheckpointManager,
    signals: Signals,
    *,
    hooks: Sequence[Observer],
    screen: TextIO | None,
    facts: Mapping[str, Any],
    news: Sequence[str],
    mirror: ObjectStoreCopy | None,
) -> RunResult:
    """How the steps ended, all of them, those before which it went back among them."""
    while True:
        parts, start = begin.parts, begin.start
        there.check_rows(begin.rows, start or 0)
        before: dict[str, Any] = {
            "earlier": begin.earlier,
            "known": begin.known,
            "extended": begin.extended,
        }
        if mirror is not None:
            before["copy"] = mirror.copy
        with RunHooks(parts, there, checkpoints, start=start, screen=screen, **before) as watch:
            if there.first:
                readers = gone_on(there.stands(), start or 0, jax.process_count())
                there.say("running", step=start or 0, why="", readers=readers, **facts)
            ended = run_steps(
                parts, step, state, watch, signals, hooks=hooks, start=start, news=news
            )
            if not isinstance(ended.stop, Rollback):
                outcome = _finish(parts, there, checkpoints, watch, signals, ended)
                if mirror is not None:
                    mirror.finish(outcome.kept)
                return outcome
            watch.ended("stopped")
            news = [decide_rollback(parts, watch.guarded, ended.stop)]
        del state, ended  # room for the one that comes
        checkpoints.wait()
        told = len(checkpoints.news)
        with HEARTBEAT.during("restore"):
            begin = resume_point(parts, there, checkpoints)
            state = _state(begin, checkpoints)
        news += checkpoints.news[told:]  # of those that were passed over on the way back


@contextlib.contextmanager
def _crashes(
    directory: RunDir, checkpoints: CheckpointManager, tell: Callable[[str], None]
) -> Iterator[None]:
    """Where an error ends what is within, the directory says so; a kill leaves it at running."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        lines = LogLines(directory.log if directory.is_there else None, screen=tell)
        lines.write(f"ended by an error: {why}")
        if directory.first:
            try:
                checkpoints.wait()  # until a save that was begun has said that it is done
            except Exception as second:
                lines.print(f"and a save has failed: {second}")
            with contextlib.suppress(OSError):  # a full disk, which may be what ends it
                directory.say("crashed", why=why.partition("\n")[0])
        raise


def _finished(
    directory: RunDir, config: RunConfig, stored: RunConfig | None, processes: int
) -> tuple[RunResult | None, list[str]]:
    """How a run ended that was finished before, or a line that says why it has to go on."""
    stands = directory.stands()
    if stands.get("status") != "done" or (stored and _goes_further(config, stored)):
        return None, []
    step, owner = stands.get("step"), directory.owner()
    checkpoints = CheckpointManager(directory.checkpoints, first=directory.first, owner=owner)
    checkpoints.tidy()

    def look() -> dict[str, str]:
        steps = config.steps if isinstance(config.steps, int) else stands.get("steps", step)
        if step != steps and not stands.get("why"):
            return {"not": f"of {steps}, and nothing says why it should have ended there"}
        if step is None or not checkpoints.is_whole(step):
            return {"not": "of which the checkpoint is damaged or gone"}
        directory.check_rows(checkpoints.about(step).get("rows", {}), step)
        return {"not": "and has lost rows since" if directory.lost.found else ""}

    wrong = _of_first(look, processes)["not"]
    if step is None or wrong:
        return None, [f"was done at step {step}, {wrong}"]
    found = {name: results(directory.metrics, name) for name in stands.get("sets", ["valid"])}
    return RunResult(directory, "done", step, step, "it was finished before", found), []


def _of_first(make: Callable[[], dict[str, Any]], processes: int) -> dict[str, Any]:
    """What the first process makes; one alone does not ask JAX which it is: that starts devices."""
    return broadcast_from_first(make) if processes > 1 else make()


def _goes_further(config: RunConfig, stored: RunConfig) -> bool:
    """Whether a run that was finished as `stored` may have more to do."""
    patience = config.evaluate.patience != stored.evaluate.patience
    return patience or lengths(config) != stored_lengths(config, stored)


def _begun(
    config: RunConfig,
    parts: TrainSetup,
    directory: RunDir,
    checkpoints: CheckpointManager,
    another: str,
) -> tuple[ResumePoint, StepFn, TrainState]:
    """Where a run begins, its compiled step, and the state there, of a checkpoint that holds."""
    check_rate(parts.config)
    while True:
        with HEARTBEAT.during("restore"):  # every byte of a checkpoint is read
            begin = resume_point(parts, directory, checkpoints)
        if begin.start is not None:
            about = checkpoints.about(begin.start)
            where, disk_advice = (
                directory.checkpoints / str(begin.start),
                f"Start a new run: {another}",
            )
            check_about(about, config, where, disk_advice, also=lengths(config))
            directory.refuse_other_data(parts.data, another, known=about.get("data"))
        check_steps(parts.config, begin.start or 0, directory.path, another)
        make = functools.partial(_state, begin, checkpoints)
        with contextlib.suppress(SetAsideError):  # its arrays are not what was saved: one before it
            return begin, *compile_step(begin.parts, make, begin.start)


def _state(begin: ResumePoint, checkpoints: CheckpointManager) -> TrainState:
    """That a run begins from."""
    parts = begin.parts
    if begin.start is None:
        return parts.fresh()
    return checkpoints.restore(begin.start, parts.like)


def _finish(
    parts: TrainSetup,
    directory: RunDir,
    checkpoints: CheckpointManager,
    watch: RunHooks,
    signals: Signals,
    ended: LoopResult[TrainState],
) -> RunResult:
    """Keeps the last state, says how it ended, and shows what was learned."""
    stop, sample = ended.stop or Stop("", "finished"), ""
    try:
        for evaluation in watch.evaluations.values() if stop.kind == "finished" else ():
            evaluation.at(ended.step, ended.state)
        watch.save.at(ended.step, ended.state)
        if stop.kind == "finished":
            sample = _shown(parts, directory, watch, signals, ended)
    except StoppedError as asked:  # all steps are taken; the rest is done when it goes on
        stop = asked.stop
        watch.save.at(ended.step, ended.state)
    with HEARTBEAT.during("save"):
        watch.settle(ended.step, ended.state)  # what is announced is on the disk
    status, why = ENDS[stop.kind], stop.why
    if status == "done" and directory.lost.found:
        status, why = "failed", directory.lost.why
    directory.say(status, step=ended.step, why=why)
    watch.ended(status)
    # The end of one may be that of all, and the first has more to do. Who is gone is no matter.
    with HEARTBEAT.during("end"), contextlib.suppress(RuntimeError, ValueError):
        barrier()
    found = {name: evaluation.results for name, evaluation in watch.evaluations.items()}
    lost = tuple(directory.lost.found)
    return RunResult(
        directory, status, ended.step, checkpoints.newest(), why, found, sample, ended.numbers, lost
    )


def _write_sample(path: Path, text: str, watch: RunHooks) -> None:
    """Writes it; where that is refused the run is done all the same, and says so."""
    try:
        with open_regular(path, "wb") as file:
            file.write(f"{text}\n".encode("utf-8", "replace"))
    except OSError as error:
        todo = disk_advice(error, path).words
        watch.lines.print(f"the sample could not be written to {path} ({error.strerror}). {todo}.")


def _shown(
    parts: TrainSetup,
    directory: RunDir,
    watch: RunHooks,
    signals: Signals,
    ended: LoopResult[TrainState],
) -> str:
    """The sample of what was learned, empty if there is none; and pictures, drawn."""
    sample = parts.experiment.sample
    text = ""
    if sample is not None:
        with watch.pause("sampling"), signals.interruptible():
            here = parts.here(ended.state)
            text = sample(*here) if directory.first else ""
            barrier()
        if directory.first:
            _write_sample(directory.samples, text, watch)
    if watch.pictures is not None:
        with signals.interruptible():
            watch.pictures.at(ended.step, ended.state)
    return text
