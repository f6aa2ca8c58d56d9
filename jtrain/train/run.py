"""`jt.run`: train a config in its directory, or resume the run there."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.top import RUNS
from jtrain.core.loop import Hook
from jtrain.distributed.cluster.cluster import program as command
from jtrain.distributed.compiler_flags import apply_flags
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.distributed.watchdog import StartupProgress, Watchdog
from jtrain.errors import ConfigError, UserError
from jtrain.errors.user_code import api_boundary
from jtrain.io.hub import pin_commits, resolved_commits
from jtrain.io.log import LOG, RunLog
from jtrain.train.code_digest import digest_code
from jtrain.train.compile_step import record_compile, resolve_with_step_time
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.function_hooks import Observer, to_hook
from jtrain.train.hooks.signals import GraceBudget, Signals
from jtrain.train.longer_run import describe_length_change
from jtrain.train.processes import join_run
from jtrain.train.program import Program
from jtrain.train.resume import (
    describe_code,
    describe_missing_checkpoint,
    log_changes,
    match_config,
    resume_advice,
)
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir, get_environment
from jtrain.train.run_result import RunResult, find_finished
from jtrain.train.run_store import DirectoryStore, RemoteRun, RunStore, StartedRun
from jtrain.train.runtime import enable_compilation_cache, pause_collection, reuse_memory
from jtrain.train.supersteps import find_hook_ends
from jtrain.train.trackers import check_installed
from jtrain.train.trainer import train_to_end


@api_boundary
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
    config = config if config.name else dataclasses.replace(config, name=config.run_name)
    path = directory or RUNS / config.name
    again = again or ("the same call of jt.run again" if directory else "")
    another = f"name={config.name}-2"
    another = another if again else f"{command()} run {source or 'CONFIG'} ... {another}"
    reuse_memory()
    enable_compilation_cache()
    flags = apply_flags(config.xla.preset, config.xla.flags, config.xla.tpu_flags)
    HEARTBEAT.begin_run(path, config.checkpoint.grace)
    cluster = join_run(config, path)
    run_dir = RunDir(path, again, cluster.index)
    with RunLog(screen, shows=run_dir.first) as log:
        remote = None
        if config.checkpoint.store:
            remote = RemoteRun(run_dir, config.name, config.checkpoint)
            remote.fetch_for_all(cluster.processes)
        advice = functools.partial(resume_advice, run_dir, config.name, another, again)
        matched = match_config(run_dir, config, advice)
        config = matched.config
        edited = describe_code(run_dir, config.code_root(), another)
        finished = find_finished(run_dir, matched, cluster.processes)
        if finished is not None:
            return _end_finished(finished, remote, edited)
        # Broadcasting starts the devices, and a single process has nothing to wait for.
        several = cluster.processes > 1
        identity = broadcast_from_first(run_dir.identify) if several else run_dir.identify()
        run_dir.pin_models()
        if several:  # a branch may have moved between two processes
            pin_commits(broadcast_from_first(resolved_commits))
        for line in (*cluster.describe(), *flags, *matched.changed, *edited):
            LOG.info(line)
        log_changes(run_dir, identity, os.environ)
        owner = run_dir.adopt(identity, config)
        check_installed(config.trackers)
        with (
            Watchdog(path, cluster.index),
            Signals(budget=GraceBudget(config.checkpoint.grace)) as signals,
            _open_checkpoints(run_dir, config, owner) as checkpoints,
        ):
            checkpoints.acquire()  # an error if another process writes there, before data is read
            store = DirectoryStore(config, run_dir, checkpoints, remote, another)
            program, started, own_hooks = start_run(config, store, hooks)
            store.begin(started.resume)
            log.open(run_dir.log)
            _log_start(store, program, started.resume)
            with _record_crash(store):
                _record_start(store, program, started.resume)
                trained = train_to_end(program, started, store, signals, log, own_hooks)
    return RunResult(
        run_dir,
        trained.status,
        trained.ended.step,
        trained.checkpoint,
        trained.why,
        trained.results,
        trained.sample,
        trained.ended.numbers,
    )


def start_run(
    config: RunConfig, store: RunStore, hooks: Sequence[Observer] = ()
) -> tuple[Program, StartedRun, list[Hook]]:
    """Resolve a config, compile its step, and return where its run starts, and the caller's hooks.

    Raises:
        UserError: for what is wrong with config, data or disk, or if one of `hooks` is no hook.
    """
    if isinstance(hooks, Hook) or callable(hooks):
        raise ConfigError("hooks= takes a list, and one hook was given: write hooks=[it]")
    own = [to_hook(hook, steps_per_call=config.steps_divisor) for hook in hooks]
    shown = store.run_dir is None or store.run_dir.first
    with pause_collection(), StartupProgress(LOG.info) if shown else contextlib.nullcontext():
        program = Program(resolve_with_step_time(config, store.pace))
        ends = find_hook_ends(own, program.resolved.config.steps)
        started = store.start(program, program.schedule.ending_for(ends))
    return program, started, own


def _open_checkpoints(run_dir: RunDir, config: RunConfig, owner: RunIdentity) -> CheckpointManager:
    return CheckpointManager(
        run_dir.checkpoints,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        best=config.checkpoint.best,
        first=run_dir.first,
        fall_back=config.checkpoint.on_damage == "fall_back",
        owner=owner,
    )


def _end_finished(
    finished: RunResult, remote: RemoteRun | None, edited: Sequence[str]
) -> RunResult:
    """Log that nothing is left to train, after the last checkpoint is copied."""
    if remote is not None:
        remote.copy_finished(finished.step)
    finished = dataclasses.replace(finished, why="; ".join([finished.why, *edited]))
    LOG.info(f"{finished.directory.path}: {finished.why}")
    return finished


def _log_start(store: DirectoryStore, program: Program, resume: ResumePoint) -> None:
    """Log what is missing, the weights that a run starts from, and its changed lengths."""
    checkpoints = store.checkpoints
    missing = describe_missing_checkpoint(store.run_dir, checkpoints, resume.start)
    for line in (*missing, *checkpoints.notices):
        LOG.warning(line)
    # A resumed run has all in its checkpoint, wherever its first parameters came from.
    stored = program.stored_weights if resume.start is None else None
    for line in stored.lines() if stored else ():
        LOG.info(line)
    for change in resume.extended:
        if change.step == resume.start:
            for line in describe_length_change(program.resolved.config, change):
                LOG.info(line)


def _record_start(store: DirectoryStore, program: Program, resume: ResumePoint) -> None:
    """Write what was compiled, and to run.json that the run trains, with facts about it."""
    start, resolved = resume.start or 0, program.resolved
    if store.run_dir.first:
        with contextlib.suppress(UserError, OSError):  # the run does not need the file
            record_compile(store.run_dir.compiles, program, resume.schedule, start)
    config = resolved.config
    facts = {"sets": list(resolved.sets), "data": resolved.data}
    facts |= get_environment(resolved.devices)
    facts |= {"layout": dict(resolved.strategy.axes), "shards": resolved.strategy.shares}
    facts |= {"steps": config.steps, "code": digest_code(config.code_root())}
    if commits := resolved_commits():
        facts["hub"] = commits
    if resolved.experiment.tokenizer:
        facts["tokenizer"] = resolved.experiment.tokenizer
    if resolved.lengths.seconds:
        facts["seconds_per_step"] = resolved.lengths.seconds
    store.write_running(start, facts)


@contextlib.contextmanager
def _record_crash(store: DirectoryStore) -> Iterator[None]:
    """Record an error that ends the block as status `crashed`; a kill leaves `running`."""
    run_dir = store.run_dir
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        LOG.error(f"ended by an error: {why}")
        if run_dir.first:
            try:
                store.checkpoints.wait()  # so that a save in progress is recorded
            except Exception as second:
                LOG.error(f"and a save has failed: {second}")
            with contextlib.suppress(OSError):  # a full disk, which may be what ends it
                run_dir.write_status("crashed", why=why.partition("\n")[0])
        raise
