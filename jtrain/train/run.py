"""`jt.run`: train a config in its directory, or resume the run there."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jtrain.config.top import RUNS
from jtrain.core.loop import Hook
from jtrain.distributed.cluster.cluster import command_words
from jtrain.distributed.compiler_flags import apply_flags
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.distributed.watchdog import StartupProgress, Watchdog
from jtrain.errors import ConfigError
from jtrain.errors.user_code import api_boundary
from jtrain.io.hub import pin_commits, resolved_commits
from jtrain.io.log import LOG, RunLog
from jtrain.train.call_schedule import find_call_ends
from jtrain.train.code_digest import digest_code
from jtrain.train.compile_step import resolve_with_step_time
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.function_hooks import Observer, to_hook
from jtrain.train.hooks.signals import GraceBudget, Signals
from jtrain.train.longer_run import log_length_change
from jtrain.train.processes import join_run
from jtrain.train.program import Program
from jtrain.train.resume import (
    describe_edits,
    log_changes,
    match_config,
    resume_advice,
    warn_of_missing_checkpoint,
)
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir
from jtrain.train.run_result import RunResult, find_finished
from jtrain.train.run_store import (
    DirectoryStore,
    RemoteRun,
    RunStore,
    StartedRun,
    open_checkpoints,
)
from jtrain.train.runtime import enable_compilation_cache, pause_collection, reuse_memory
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
    resume_command: str = "",
) -> RunResult:
    """Train `config` in runs/NAME, or resume that run.

    A finished run is trained longer where the config has more steps than it took.

    Args:
        source: the file the config was read from, for advice.
        hooks: observers of your own, beside those of the config; plain functions too, by the names
            of what they take: (step, numbers), (step, state) or (step, results). A function of a
            state is called after each call of the compiled step (1 or more steps), unless it has a
            cadence: `jt.hooks.on_state(function, every=100)`.
        screen: stream to print to; standard output by default.
        directory: of the run, where it is not runs/NAME.
        resume_command: how to resume the run, for messages; by default `jtrain run` of the config
            in runs/NAME, or this call where `directory` is given.

    Raises:
        UserError: for what is wrong with config, data or disk, before anything is trained.
        PeerError: if another process of the run does not come.
    """
    if not isinstance(config, RunConfig):
        given = type(config).__name__
        raise ConfigError(f"jt.run takes a config, not a {given}: jt.run(jt.resolve(FILE).config).")
    config = config if config.name else dataclasses.replace(config, name=config.run_name)
    path = directory or RUNS / config.name
    if directory and not resume_command:
        resume_command = "the same call of jt.run again"
    how = f"name={config.name}-2"
    new_run = how if resume_command else f"{command_words()} run {source or 'CONFIG'} ... {how}"
    reuse_memory()
    enable_compilation_cache()
    flag_lines = apply_flags(config.xla.preset, config.xla.flags, config.xla.tpu_flags)
    HEARTBEAT.begin_run(path, config.checkpoint.grace)
    cluster = join_run(config, path)
    run_dir = RunDir(path, resume_command, cluster.index)
    with RunLog(screen, shows=run_dir.first) as log:
        remote = None
        if config.checkpoint.store:
            remote = RemoteRun(run_dir, config.name, config.checkpoint)
            remote.fetch_for_all()
        advice = functools.partial(resume_advice, run_dir, config.name, new_run, resume_command)
        matched = match_config(run_dir, config, advice)
        config = matched.config
        code = digest_code(config.code_root())
        edited = describe_edits(run_dir, code, new_run)
        finished = find_finished(run_dir, matched)
        if finished is not None:
            return _end_finished(finished, remote, edited)
        identity = broadcast_from_first(run_dir.identify)
        run_dir.pin_models()
        # Each process resolves names by itself, and a branch may have moved in between.
        pin_commits(broadcast_from_first(resolved_commits))
        for line in (*cluster.describe(), *flag_lines, *matched.changed, *edited):
            LOG.info(line)
        log_changes(run_dir, identity, os.environ)
        owner = run_dir.adopt(identity, config)
        check_installed(config.trackers)
        with (
            Watchdog(path, cluster.index),
            Signals(budget=GraceBudget(config.checkpoint.grace)) as signals,
            open_checkpoints(run_dir, config.checkpoint, owner) as checkpoints,
        ):
            # An error if another process writes there, before data is read; the store checks again.
            checkpoints.acquire()
            store = DirectoryStore(config, run_dir, checkpoints, remote, new_run)
            program, started, own_hooks = start_run(config, store, hooks)
            store.begin()
            log.open(run_dir.log)
            _log_start(store, program, started.resume)
            with store.record_crash():
                store.write_start(program.resolved, started.resume, code)
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
    """Resolve a config, compile its step, and restore or make its state; return the hooks, too.

    Raises:
        UserError: for what is wrong with config, data or disk, or if one of `hooks` is not a hook.
    """
    if isinstance(hooks, Hook) or callable(hooks):
        raise ConfigError("hooks= takes a list, and one hook was given: write hooks=[it]")
    own = [to_hook(hook, steps_per_call=config.steps_divisor) for hook in hooks]
    shown = store.run_dir is None or store.run_dir.first
    progress = StartupProgress(LOG.info) if shown else contextlib.nullcontext()
    with pause_collection(), progress:
        seconds = store.run_dir.pace if store.run_dir else 0.0  # of a step, by an earlier start
        program = Program(resolve_with_step_time(config, seconds))
        # A call of several steps ends where a hook takes the state.
        ends = find_call_ends(own, program.resolved.config.steps)
        started = store.start(program, program.schedule.ending_for(ends))
    return program, started, own


def _end_finished(
    finished: RunResult, remote: RemoteRun | None, edited: Sequence[str]
) -> RunResult:
    if remote is not None:
        remote.copy_finished(finished.step)
    finished = dataclasses.replace(finished, why="; ".join([finished.why, *edited]))
    LOG.info(f"{finished.directory.path}: {finished.why}")
    return finished


def _log_start(store: DirectoryStore, program: Program, resume: ResumePoint) -> None:
    warn_of_missing_checkpoint(store.run_dir, store.checkpoints, resume.start)
    for line in store.checkpoints.notices:
        LOG.warning(line)
    # A resumed run has all in its checkpoint, wherever its first parameters came from.
    if resume.start is None and program.stored_weights:
        for line in program.stored_weights.lines():
            LOG.info(line)
    if resume.extended and resume.extended[-1].step == resume.start:
        log_length_change(program.resolved.config, resume.extended[-1])
