"""Stores of a run: memory, its directory, and an object store that has copies of checkpoints."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jtrain.checkpoint import CheckpointManager, SetAsideError, object_store_layout
from jtrain.checkpoint.lock import WriteLock
from jtrain.checkpoint.retention import count_saves
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.config.top import CheckpointConfig
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.core.types import Extra, Params
from jtrain.data.batches.stream import add_readers
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import FAULT, ConfigError, UnreachableError, UserError
from jtrain.io.disk_errors import may_pass
from jtrain.io.object_store import ObjectStore
from jtrain.io.regular_files import parse_json
from jtrain.train.compile_step import compile_step
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.evaluation import EvaluateEvery
from jtrain.train.longer_run import check_rate, check_steps
from jtrain.train.multihost_checks import check_shared_directory
from jtrain.train.rollback import ResumePoint, resume_point
from jtrain.train.run_dir import RunDir
from jtrain.train.setup import TrainSetup


class StartedRun(NamedTuple):
    """Where a run starts, its compiled step, and the state that it starts from."""

    resume: ResumePoint
    step: StepFn
    state: TrainState


class MemoryStore:
    """Store of a run that writes nothing: it holds the weights of the best evaluation."""

    run_dir: RunDir | None = None
    pace = 0.0
    """Seconds of a step by which the run converted its durations in time; 0: not measured."""

    def __init__(self):
        self.best_weights: tuple[Params, Extra] | None = None
        """Copies of the parameters and the extra state; None where no best was asked for."""

    def start(self, setup: TrainSetup) -> StartedRun:
        """Compile the step and make the first state.

        Raises:
            UserError: as `compile_step`.
        """
        check_rate(setup.config)
        return StartedRun(ResumePoint(None, setup), *compile_step(setup, setup.fresh))

    def holder(
        self, setup: TrainSetup, best: EvaluateEvery | None
    ) -> Callable[[int, TrainState], None]:
        """Return a function of step and state that holds the weights of the best evaluation."""

        def hold(step: int, state: TrainState) -> None:
            if best is not None and best.best is not None and best.best.step == step:
                weights = setup.evaluation_params(state), state.extra
                self.best_weights = jax.tree.map(jnp.copy, weights)

        return hold


class RemoteRun:
    """The copies of a run in an object store.

    Args:
        run_dir: the run on this machine.
        name: of the run; its copies are in `checkpoint.store`/NAME.
        checkpoint: where the copies are, and which of them are retained.
    """

    def __init__(self, run_dir: RunDir, name: str, checkpoint: CheckpointConfig):
        self._run_dir, self._name = run_dir, name
        self._keep, self._best = checkpoint.keep, checkpoint.best
        self._store = ObjectStore(f"{checkpoint.store.rstrip('/')}/{name}")

    def fetch_for_all(self, processes: int) -> list[str]:
        """Fetch as `fetch` in the first process, while the others wait; return notices.

        Raises:
            UserError: as `fetch`; with several processes a ConfigError in all of them.
        """
        if processes == 1:
            return self.fetch()

        def fetch() -> dict[str, Any]:
            try:
                return {"news": self.fetch()}
            except UserError as error:  # raised in all processes, or the others would wait for ever
                code = FAULT if may_pass(error) else error.code
                return {"news": [], "error": str(error), "code": code}

        result = broadcast_from_first(fetch)
        if message := result.get("error"):
            raise UnreachableError(message) if result["code"] == FAULT else ConfigError(message)
        return result["news"] if self._run_dir.first else []

    def fetch(self) -> list[str]:
        """Fetch the newest copy, if it is newer than the local checkpoints; return notices.

        Only for the first process.

        Raises:
            ConfigError: if the store holds another run of this name.
            ObjectStoreError: if the store cannot be read.
            CheckpointError: if another process writes in the run's directory.
        """
        store, run_dir = self._store, self._run_dir
        copies = object_store_layout.list_copies(store)
        owner = run_dir.owner()
        newest = CheckpointManager(run_dir.checkpoints, first=True, owner=owner).newest()
        newest = -1 if newest is None else newest
        if not copies:
            return []
        if owner is not None and owner.run not in (found := _ids(store)):
            raise ConfigError(
                f"{store.address} is the store of the run in {run_dir.path}, but it holds another "
                f"run of this name ({found[0] or 'without id'}). Give this run another name "
                f"(name={self._name}-2) or another checkpoint.store."
            )
        if copies[-1] <= newest:
            return []
        lock = WriteLock(run_dir.checkpoints)
        try:
            step, news = object_store_layout.fetch_newest(store, run_dir.path, above=newest)
        finally:
            lock.release()
        if step is None:
            return news
        return [*news, f"checkpoint {step} and the run's files were fetched from {store.address}"]

    def start_uploader(
        self, checkpoints: CheckpointManager, log: Callable[[str], None] = lambda line: None
    ) -> CheckpointUploader:
        """Start and return the uploader of the run's checkpoints; only for the first process.

        Raises:
            ObjectStoreError: if the store is not writable.
        """
        uploader = CheckpointUploader(
            self._store, self._run_dir.path, keep=self._keep, best=checkpoints.best, log=log
        )
        uploader.begin()
        return uploader

    def copy_finished(self, step: int) -> None:
        """Copy the last checkpoint of a finished run, unless the store has it.

        Raises:
            SaveError: if the store does not take it.
        """
        run_dir = self._run_dir
        if run_dir.first and step not in object_store_layout.list_copies(self._store):
            checkpoints = CheckpointManager(
                run_dir.checkpoints, best=self._best, first=True, owner=run_dir.owner()
            )
            self.start_uploader(checkpoints).finish(step, missing=True)


class DirectoryStore:
    """Store of a run in its directory, with copies of its checkpoints if the config asks for them.

    Args:
        config: as the run was given it.
        run_dir: files of the run.
        checkpoints: of the run; the caller closes them.
        remote: copies of the run in an object store; None: no copies.
        another: the command that starts another run, for messages.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        checkpoints: CheckpointManager,
        remote: RemoteRun | None,
        another: str,
    ):
        self.run_dir, self.checkpoints = run_dir, checkpoints
        self._config, self._remote, self._another = config, remote, another
        self._uploader: CheckpointUploader | None = None

    @property
    def pace(self) -> float:
        """Seconds of a step by which the run converted its durations in time; 0: not measured."""
        return self.run_dir.pace

    def start(self, setup: TrainSetup) -> StartedRun:
        """Compile the step, and restore the newest valid checkpoint or make the first state.

        Raises:
            UserError: as `compile_step`; if the data or the config is not that of the run, or the
                disk has no room for a checkpoint.
        """
        self.checkpoints.acquire()
        if self.checkpoints.newest() is not None:  # else once the first step is done
            self.checkpoints.prepare()
        self.run_dir.check_tokenizer(setup.experiment.tokenizer)
        self.run_dir.check_data(setup.data, self._another)
        every, newest = setup.config.checkpoint.every, self.checkpoints.newest() or 0
        in_steps = isinstance(every, int)  # else by the clock
        saves = count_saves(newest, setup.config.steps, every) if in_steps else None
        self.checkpoints.check_room(setup.like, saves=saves)
        check_rate(setup.config)
        while True:
            with HEARTBEAT.during("restore"):  # every byte of a checkpoint is read
                resume = resume_point(setup, self.run_dir, self.checkpoints)
            self._check_resume(resume)
            make_state = functools.partial(self._state, resume)
            with contextlib.suppress(SetAsideError):  # damaged: resume from the one before it
                return StartedRun(resume, *compile_step(resume.setup, make_state, resume.start))

    def begin(self, resume: ResumePoint) -> None:
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
            notices = self.checkpoints.notices
            self._uploader = self._remote.start_uploader(self.checkpoints, notices.append)

    def restart(self, setup: TrainSetup) -> tuple[ResumePoint, TrainState, list[str]]:
        """Return where a run resumes after a rollback, its state, and lines for the log."""
        self.checkpoints.wait()
        known = len(self.checkpoints.notices)
        with HEARTBEAT.during("restore"):
            resume = resume_point(setup, self.run_dir, self.checkpoints)
            state = self._state(resume)
        return resume, state, self.checkpoints.notices[known:]  # of those that were passed over

    def write_running(self, resume: ResumePoint, facts: Mapping[str, Any]) -> None:
        """Write to run.json that the run trains from here on."""
        if self.run_dir.first:
            start = resume.start or 0
            readers = add_readers(self.run_dir.facts(), start, jax.process_count())
            self.run_dir.write_status("running", step=start, why="", readers=readers, **facts)

    def copy(self, step: int) -> None:
        """Copy a checkpoint, if copies are configured."""
        if self._uploader is not None:
            self._uploader.copy(step)

    def finish(self) -> int | None:
        """Wait for the copies, and return the step of the newest checkpoint."""
        newest = self.checkpoints.newest()
        if self._uploader is not None:
            self._uploader.finish(newest)
        return newest

    def _check_resume(self, resume: ResumePoint) -> None:
        """Raise unless the config and the data are those of the checkpoint."""
        setup, start = resume.setup, resume.start
        if start is not None:
            about = self.checkpoints.about(start)
            self.run_dir.check_data(setup.data, self._another, known=about.get("data"))
        check_steps(setup.config, start or 0, self.run_dir.path, self._another)

    def _state(self, resume: ResumePoint) -> TrainState:
        if resume.start is None:
            return resume.setup.fresh()
        return self.checkpoints.restore(resume.start, resume.setup.like)


RunStore: TypeAlias = MemoryStore | DirectoryStore


def _ids(store: ObjectStore) -> list[str]:
    """Return the id of the run in the store, and the ids of the runs that it was copied from."""
    try:
        facts = parse_json(store.read("run.json") or b"{}")
        return [str(facts.get("id", "")), *facts.get("ancestors", {})]
    except (ValueError, AttributeError, TypeError):
        return [""]
