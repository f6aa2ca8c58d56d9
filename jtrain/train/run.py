"""`jt.run`: train a config in its directory, or resume the run there."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from jtrain.checkpoint import CheckpointManager
from jtrain.config.top import RUNS
from jtrain.distributed.cluster.cluster import program
from jtrain.distributed.compiler_flags import apply_flags
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.distributed.watchdog import Watchdog
from jtrain.errors.user_code import api_boundary
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.hooks.signals import GraceBudget, Signals
from jtrain.train.longer_run import describe_length_change
from jtrain.train.processes import join_run
from jtrain.train.remote_copies import RemoteRun
from jtrain.train.resume import (
    describe_code,
    describe_copy,
    describe_flags,
    describe_missing_checkpoint,
    match_config,
    resume_advice,
)
from jtrain.train.rollback import ResumePoint
from jtrain.train.run_dir import RunDir
from jtrain.train.run_result import RunResult, find_finished
from jtrain.train.run_store import DirectoryStore
from jtrain.train.runtime import enable_compilation_cache, reuse_memory
from jtrain.train.trackers import check_installed
from jtrain.train.train_to_end import start_run, train_to_end


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
    reuse_memory()
    enable_compilation_cache()
    flags = apply_flags(config.xla.preset, config.xla.flags, config.xla.tpu_flags)
    config = config if config.name else dataclasses.replace(config, name=config.experiment)
    path = directory or RUNS / config.name
    again = again or ("the same call of jt.run again" if directory else "")
    HEARTBEAT.begin_run(path, config.checkpoint.grace)
    cluster = join_run(config, path)
    run_dir = RunDir(path, again, cluster.index)
    another = f"name={config.name}-2"
    another = another if again else f"{program()} run {source or 'CONFIG'} ... {another}"
    remote = RemoteRun(run_dir, config.name, config.checkpoint) if config.checkpoint.store else None
    fetched = remote.fetch_for_all(cluster.processes) if remote else []
    advice = functools.partial(resume_advice, run_dir, config.name, another, again)
    matched = match_config(run_dir, config, advice)
    config, changed = matched.config, matched.changed
    edited = describe_code(run_dir, config.code_root(), another)
    finished = find_finished(run_dir, matched, cluster.processes)
    if finished is not None:
        if remote is not None:
            remote.copy_finished(finished.step)
        finished = dataclasses.replace(finished, why="; ".join([finished.why, *edited]))
        if run_dir.first:
            print(f"{path}: {finished.why}", file=screen, flush=True)
        return finished
    changed += edited
    # A single process does not start the devices for it.
    several = cluster.processes > 1
    identity = broadcast_from_first(run_dir.identify) if several else run_dir.identify()
    changed += describe_copy(run_dir, identity)
    changed += describe_flags(run_dir, os.environ)
    owner = run_dir.adopt(identity, config)
    check_installed(config.trackers)
    with (
        Watchdog(path, cluster.index),
        Signals(budget=GraceBudget(config.checkpoint.grace)) as signals,
        CheckpointManager(
            run_dir.checkpoints,
            keep=config.checkpoint.keep,
            best=config.checkpoint.best,
            first=run_dir.first,
            fall_back=config.checkpoint.on_damage == "fall_back",
            owner=owner,
        ) as checkpoints,
    ):
        checkpoints.acquire()  # an error if another process writes there, before any data is read
        store = DirectoryStore(config, run_dir, checkpoints, remote, another)
        started = start_run(config, store, screen, hooks)
        missing = describe_missing_checkpoint(run_dir, checkpoints, started.resume.start)
        store.begin(started.resume)
        notices = [
            *cluster.describe(),
            *flags,
            *fetched,
            *missing,
            *checkpoints.notices,
            *_describe_start(started.resume, changed),
        ]
        trained = train_to_end(store, started, signals, screen=screen, notices=notices)
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


def _describe_start(resume: ResumePoint, changed: Sequence[str]) -> list[str]:
    """Return lines about the weights that a run starts from, and its changed values."""
    setup = resume.setup
    # A resumed run has all in its checkpoint, wherever its first parameters came from.
    weights = setup.begins.lines() if resume.start is None and setup.begins else []
    changes = [change for change in resume.extended if change.step == resume.start]
    lengths = [line for change in changes for line in describe_length_change(setup.config, change)]
    return [*weights, *changed, *lengths]
