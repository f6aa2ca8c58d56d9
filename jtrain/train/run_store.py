"""Stores of a run: memory, or its directory, with copies in an object store."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.checkpoint import CheckpointManager, SetAsideError, object_store_layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.checkpoint.retention import count_saves
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.config.top import CheckpointConfig
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Extra, Params
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import ConfigError
from jtrain.io.hub import resolved_commits
from jtrain.io.log import LOG
from jtrain.io.object_store import ObjectStore
from jtrain.io.regular_files import parse_json
from jtrain.train.call_schedule import CallSchedule
from jtrain.train.compile_step import compile_step
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import EvaluateEvery
from jtrain.train.longer_run import check_rate
from jtrain.train.processes import check_shared_directory
from jtrain.train.program import Program
from jtrain.train.resolve import Resolved
from jtrain.train.rollback import ResumePoint, find_resume_point
from jtrain.train.run_dir import RunDir, get_environment


class StartedRun(NamedTuple):
    """Where a run starts, its compiled step, and the state that it starts from."""

    resume: ResumePoint
    step: StepFn
    state: TrainState


class MemoryStore:
    """Store of a run that writes nothing: it holds the weights of the best evaluation."""

    run_dir: RunDir | None = None

    def __init__(self):
        self.best_weights: tuple[Params, Extra] | None = None
        """Copies of the parameters and the extra state; None where no best was asked for."""

    def start(self, program: Program, schedule: CallSchedule) -> StartedRun:
        """Compile the step and make the first state.

        Raises:
            UserError: as `compile_step`.
        """
        check_rate(program.resolved.config)
        resume = ResumePoint(start=None, batches=program.batches(schedule))
        compiled = compile_step(program, program.initial_state, resume.batches)
        return StartedRun(resume, *compiled)

    def holder(
        self, program: Program, best: EvaluateEvery | None
    ) -> Callable[[int, TrainState], bool]:
        """Return a function of step and state that holds the weights of the best evaluation."""

        def hold(step: int, state: TrainState) -> bool:
            if best is not None and best.is_best(step):
                weights = program.evaluation_params(state), state.extra
                self.best_weights = jax.tree.map(jnp.copy, weights)
            return True

        return hold


class RemoteRun:
    """The copies of a run in an object store.

    Args:
        name: of the run; its copies are in `checkpoint.store`/NAME.
        checkpoint: where the copies are, and which of them are retained.
    """

    def __init__(self, run_dir: RunDir, name: str, checkpoint: CheckpointConfig):
        self._run_dir, self._name, self._checkpoint = run_dir, name, checkpoint
        self._store = ObjectStore(f"{checkpoint.store.rstrip('/')}/{name}")

    def fetch_for_all(self) -> None:
        """Fetch the newest copy in the first process, while the others wait.

        Raises:
            ConfigError: if the store holds another run of this name.
            ObjectStoreError: if the store cannot be read.
            CheckpointError: if another process writes in the run's directory.
        """
        for line in broadcast_from_first(self._fetch)["notices"]:
            LOG.info(line)

    def _fetch(self) -> dict[str, Any]:
        store, path = self._store, self._run_dir.path
        copies, newest = object_store_layout.list_copies(store), self._local().newest()
        above = -1 if newest is None else newest
        owner = self._run_dir.owner()
        if copies and owner and owner.run not in (found := self._ids()):
            raise ConfigError(
                f"{store.address} is the store of the run in {path}, but it holds another run of "
                f"this name ({found[0] or 'without id'}). Give this run another name "
                f"(name={self._name}-2) or another checkpoint.store."
            )
        if not copies or copies[-1] <= above:
            return {"notices": []}
        lock = WriteLock(self._run_dir.checkpoints)
        try:
            step, notices = object_store_layout.fetch_newest(store, path, above=above)
        finally:
            lock.release()
        if step is not None:
            notices.append(
                f"checkpoint {step} and the run's files were fetched from {store.address}"
            )
        return {"notices": notices}

    def start_uploader(self, checkpoints: CheckpointManager) -> CheckpointUploader:
        """Start and return the uploader of the run's checkpoints; only for the first process.

        Raises:
            ObjectStoreError: if the store is not writable.
        """
        uploader = CheckpointUploader(
            self._store,
            self._run_dir.path,
            keep=self._checkpoint.keep,
            keep_every=self._checkpoint.keep_every,
            best=checkpoints.best,
        )
        uploader.begin()
        return uploader

    def copy_finished(self, step: int) -> None:
        """Copy the last checkpoint of a finished run, unless the store has it.

        Raises:
            SaveError: if the store does not take it.
        """
        if self._run_dir.first and step not in object_store_layout.list_copies(self._store):
            self.start_uploader(self._local()).finish(step)

    def _local(self) -> CheckpointManager:
        return open_checkpoints(self._run_dir, self._checkpoint, self._run_dir.owner())

    def _ids(self) -> list[str]:
        stored = self._store.read("run.json") or b"{}"
        try:
            facts = parse_json(stored)
            return [str(facts.get("id", "")), *facts.get("ancestors", {})]
        except (ValueError, AttributeError, TypeError):
            return [""]


def open_checkpoints(
    run_dir: RunDir, config: CheckpointConfig, owner: RunIdentity | None
) -> CheckpointManager:
    """Return the manager of a run's checkpoints, to be closed by the caller."""
    return CheckpointManager(
        run_dir.checkpoints,
        keep=config.keep,
        keep_every=config.keep_every,
        best=config.best,
        first=run_dir.first,
        fall_back=config.on_damage == "fall_back",
        owner=owner,
    )


class DirectoryStore:
    """Store of a run in its directory, with copies of its checkpoints if the config asks for them.

    Args:
        config: as the run was given it.
        checkpoints: of the run; the caller closes them.
        remote: copies of the run in an object store; None: no copies.
        new_run: how to start a new run, for messages.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        checkpoints: CheckpointManager,
        remote: RemoteRun | None,
        new_run: str,
    ):
        self.run_dir, self.checkpoints = run_dir, checkpoints
        self._config, self._remote, self._new_run = config, remote, new_run
        self._uploader: CheckpointUploader | None = None

    def start(self, program: Program, schedule: CallSchedule) -> StartedRun:
        """Compile the step, and restore the newest valid checkpoint or make the first state.

        Raises:
            UserError: as `compile_step`; if the data or the config is not that of the run, or the
                disk has no room for a checkpoint.
        """
        self.checkpoints.acquire()
        if self.checkpoints.newest() is not None:  # else once the first step is done
            self.checkpoints.prepare()
        resolved = program.resolved
        config = resolved.config
        self.run_dir.check_tokenizer(resolved.experiment.tokenizer)
        self.run_dir.check_data(resolved.data, self._new_run)
        every, newest = config.checkpoint.every, self.checkpoints.newest() or 0
        in_steps = isinstance(every, int)  # else by the clock
        saves = count_saves(newest, config.steps, every) if in_steps else None
        left = config.steps - newest
        self.checkpoints.check_room(resolved.abstract_state, saves=saves, steps=left)
        check_rate(config)
        while True:
            with HEARTBEAT.during("restore"):  # every byte of a checkpoint is read
                resume = find_resume_point(program, schedule, self.run_dir, self.checkpoints)
            start = resume.start
            if config.steps < (start or 0):
                raise ConfigError(
                    f"{self.run_dir.path} has taken {start} steps already, but "
                    f"steps={config.steps} was given. Train it longer, steps={start} or more, or "
                    f"start a new run: {self._new_run}"
                )
            make_state = functools.partial(self._state, program, start)
            with contextlib.suppress(SetAsideError):  # damaged: resume from the one before it
                compiled = compile_step(program, make_state, resume.batches, start)
                return StartedRun(resume, *compiled)

    def begin(self) -> None:
        """Create the run's directory, and start to copy its checkpoints.

        Raises:
            ConfigError: if the directory cannot be written, or is not shared by all processes.
            ObjectStoreError: if the store of the copies is not writable.
            CheckpointError: if a process of another machine began to write at the same moment.
        """
        self.checkpoints.acquire()
        self.run_dir.begin(self._config)
        check_shared_directory(self.run_dir)
        if self._remote is not None and self.run_dir.first:
            self._uploader = self._remote.start_uploader(self.checkpoints)

    def restart(self, program: Program, schedule: CallSchedule) -> tuple[ResumePoint, TrainState]:
        """Return where a run resumes after a rollback, and its state."""
        self.checkpoints.wait()
        known = len(self.checkpoints.notices)
        with HEARTBEAT.during("restore"):
            resume = find_resume_point(program, schedule, self.run_dir, self.checkpoints)
            state = self._state(program, resume.start)
        for line in self.checkpoints.notices[known:]:  # of those that were passed over
            LOG.warning(line)
        self._write_running(resume.start or 0)
        return resume, state

    def write_start(self, resolved: Resolved, resume: ResumePoint, code: Mapping[str, str]) -> None:
        """Write to run.json that the run trains, with facts about it.

        Args:
            code: digests of the code of the run.
        """
        facts = {"sets": list(resolved.sets), "data": resolved.data}
        facts |= get_environment(resolved.devices)
        facts |= {"layout": dict(resolved.strategy.axes), "shards": resolved.strategy.shares}
        facts |= {"steps": resolved.config.steps, "code": code}
        if commits := resolved_commits():
            facts["hub"] = commits
        if resolved.experiment.tokenizer:
            facts["tokenizer"] = resolved.experiment.tokenizer
        if resolved.lengths.seconds:
            facts["seconds_per_step"] = resolved.lengths.seconds
        self._write_running(resume.start or 0, facts)

    def _write_running(self, start: int, facts: Mapping[str, Any] = {}) -> None:
        if self.run_dir.first:
            readers = add_readers(self.run_dir.facts(), start, jax.process_count())
            self.run_dir.write_status("running", step=start, why="", readers=readers, **facts)

    @contextlib.contextmanager
    def record_crash(self) -> Iterator[None]:
        """Record an error that ends the block as status `crashed`; a kill leaves `running`."""
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            LOG.error(f"ended by an error: {why}")
            if self.run_dir.first:
                try:
                    self.checkpoints.wait()  # so that a save in progress is recorded
                except Exception as second:
                    LOG.error(f"and a save has failed: {second}")
                with contextlib.suppress(OSError):  # a full disk, which may be what ends it
                    self.run_dir.write_status("crashed", why=why.partition("\n")[0])
            raise

    def copy(self, step: int) -> None:
        """Copy a checkpoint, if copies are configured."""
        if self._uploader is not None:
            self._uploader.copy(step)

    def finish(self) -> None:
        """Upload the last checkpoint and files, if copies are configured."""
        if self._uploader is not None:
            self._uploader.finish(self.checkpoints.newest())

    def _state(self, program: Program, start: int | None) -> TrainState:
        if start is None:
            return program.initial_state()
        return self.checkpoints.restore(start, program.resolved.abstract_state)


RunStore: TypeAlias = MemoryStore | DirectoryStore


def add_readers(status: Mapping[str, Any], step: int, count: int) -> list[list[int]]:
    """Return `readers` of run.json when `count` processes resume after a step.

    One pair for each start: a step, and the number of processes that read the steps after it.

    Args:
        status: the current content of run.json.
    """
    return [pair for pair in status.get("readers", []) if pair[0] < step] + [[step, count]]


def count_readers(status: Mapping[str, Any], steps: Iterable[int]) -> dict[int, int]:
    """Return the number of processes that read each step's batch, where run.json has it."""
    starts = status.get("readers", [])
    return {
        step: next(count for after, count in reversed(starts) if after < step)
        for step in steps
        if starts and starts[0][0] < step
    }
