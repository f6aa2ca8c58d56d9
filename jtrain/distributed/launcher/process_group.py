"""Process group: processes that start and end together, watched from outside."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jtrain.distributed.heartbeat import ALONE, PHASES, Beat
from jtrain.distributed.launcher.worker import WorkerProcess
from jtrain.distributed.shutdown import ASKS
from jtrain.distributed.watchdog import Patience, WatchedProcess
from jtrain.errors import DONE, HUNG, MISTAKE, STOPPED
from jtrain.io.regular_files import create_new


def find_culprit(
    workers: Sequence[WorkerProcess], watched: Sequence[WatchedProcess]
) -> tuple[WorkerProcess, str]:
    """Return the culprit, and the status of all processes as evidence.

    It is the process that is stopped; else furthest behind; else in a phase without peers.
    """

    def rank(index: int) -> tuple[bool, int, bool, int]:
        beat, stopped = watched[index].beat, watched[index].stopped > 0
        assert beat is not None, "only an observed process can be late"
        return not stopped, beat.step, beat.phase not in ALONE, PHASES.index(beat.phase)

    order = sorted(range(len(workers)), key=rank)
    text = "; ".join(_status(workers[index], watched[index]) for index in order)
    return workers[order[0]], text


def _status(worker: WorkerProcess, watched: WatchedProcess) -> str:
    beat = watched.beat
    assert beat is not None, "the process was observed"
    activity = {
        "hooks": f"in a hook after step {beat.step}",
        "data": f"waiting for the data of step {beat.step + 1}",
        "step": f"in step {beat.step + 1}",
    }.get(beat.phase, f"in the phase {beat.phase}, step {beat.step}")
    activity += f", stopped by a signal for {watched.stopped:.1f} s" if watched.stopped else ""
    allowed = f", of {watched.limit:.1f} s allowed" if watched.late else ""
    return f"process {worker.index} has been {activity}, for {watched.still:.1f} s{allowed}"


POLL = 0.02  # seconds
FAREWELL = 1.0  # seconds for the others to report their own errors after one failed
OTHERS = 2.0  # seconds after one ended on a shutdown signal until the others get one
# Seconds after which the others are killed: they wait for it in a collective. All checkpoints were
# written before the first one ended.
QUIT = 20.0
# Ends that no peer's exit can cause: JAX ends a process by SIGABRT if a peer is gone.
KILLED = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS}
DUMP = 2.0  # seconds at most to write the stacks of all processes
SETTLED = 10  # looks without news after which stacks are complete: their writer may be held up
BEATS_WITHIN = 0.2  # seconds; a process with a recent beat is not stopped: the kernel is not asked


@dataclasses.dataclass(frozen=True)
class GroupExit:
    """End of a process group."""

    code: int
    worker: WorkerProcess | None = None
    """The process that failed first, or is stuck."""
    hang: str = ""
    """The status of the stuck processes; empty if none was stuck."""
    stacks: str = ""
    """The path of the stacks, or the stacks themselves, after a hang."""
    same: bool = False
    """True if all processes ended with the same mistake, which process 0 has shown."""

    @property
    def failed(self) -> bool:
        """True if the group counts as failed, so that it may be restarted."""
        return self.code not in {DONE, STOPPED}


class ProcessGroup:
    """Running worker processes, in a `with` block; none is left after the block.

    Args:
        starts: functions that start a process each, in the order of their indexes.
        patience: limits of each phase; a process without a heartbeat is watched only for a signal
            that stops it.
    """

    def __init__(self, starts: Sequence[Callable[[], WorkerProcess]], *, patience: Patience):
        self._stack = contextlib.ExitStack()
        self.workers: list[WorkerProcess] = []
        self._watched: list[WatchedProcess] = []
        self._polled = time.monotonic()
        self.signalled = False
        """True once the processes got a shutdown signal."""
        with self._stack:
            for start in starts:
                self.workers.append(self._stack.enter_context(start()))
                self._watched.append(WatchedProcess(patience))
            self._stack = self._stack.pop_all()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def beats(self) -> list[Beat]:
        """Return the last beat of each process."""
        return [worker.beat() for worker in self.workers]

    def poll(self) -> GroupExit | None:
        """Return the end as soon as one failed or is stuck, or all ended; None before."""
        now = time.monotonic()
        seconds, self._polled = min(now - self._polled, 1.0), now
        running = [worker for worker in self.workers if worker.code is None]
        if failed := self._first_failed():
            return GroupExit(failed.exit_code, failed)
        if not running:
            return GroupExit(max(self._code(worker) for worker in self.workers))
        stopped = [w.ended for w in self.workers if w.code is not None and w.code == STOPPED]
        if stopped and not self.signalled and now > min(stopped) + OTHERS:
            self.signal(signal.SIGTERM)  # one ended on a shutdown signal: so do the others
        if stopped and now > min(stopped) + QUIT:
            return GroupExit(STOPPED)
        late = [self._late(worker, seconds) for worker in running]
        return self.hang_exit(HUNG) if any(late) else None

    def kill(self, exit: GroupExit) -> GroupExit:
        """Kill all processes; after a failure the others first have time to report their errors."""
        fails = exit.failed and not exit.hang  # a stuck process may fail when it resumes
        if fails and exit.worker is not None and exit.worker.code not in KILLED | {None}:
            deadline = time.monotonic() + FAREWELL
            while time.monotonic() < deadline and any(w.code is None for w in self.workers):
                time.sleep(POLL)
            first = self._first_failed() or exit.worker  # of all that ended by themselves
            exit = dataclasses.replace(exit, code=first.exit_code, worker=first)
        for worker in self.workers:
            worker.kill()
        errors = {(worker.code, "".join(worker.tail)) for worker in self.workers}
        same = exit.code == MISTAKE and len(errors) == 1 < len(self.workers)
        return dataclasses.replace(exit, same=same)

    def signal(self, number: int) -> None:
        """Forward a signal to all processes."""
        self.signalled = True
        for worker in self.workers:
            worker.signal(number)

    def hang_exit(self, code: int) -> GroupExit:
        """Dump the stacks of all processes, and return an exit that names the culprit."""
        running = [worker for worker in self.workers if worker.code is None]
        if not running:  # the last process ended a moment ago
            return GroupExit(code)
        watched = [self._watched[worker.index] for worker in running]
        for worker in running:
            self._late(worker, 0.0)  # ensures that each process has been observed
        culprit, status = find_culprit(running, watched)
        self._dump([worker for worker in running if worker.beat().number > 0])
        run = next((Path(run) for run in (worker.beat().run for worker in running) if run), None)
        return GroupExit(code, culprit, status, _write_stacks(running, run))

    def _late(self, worker: WorkerProcess, seconds: float) -> bool:
        beat, watched = worker.beat(), self._watched[worker.index]
        stopped = watched.still > BEATS_WITHIN and worker.stopped
        late = watched.update(beat, seconds, stopped=stopped)
        return late and (beat.number > 0 or watched.stopped_too_long)

    def _code(self, worker: WorkerProcess) -> int:
        """Return its exit code; `STOPPED` too if a signal came before anything could be lost."""
        by_signal = worker.code is not None and -worker.code in ASKS
        return STOPPED if self.signalled and by_signal else worker.exit_code

    def _first_failed(self) -> WorkerProcess | None:
        ended = [worker for worker in self.workers if worker.code is not None]
        failed = [worker for worker in ended if self._code(worker) not in {DONE, STOPPED}]
        if not failed:
            return None
        # The times of the exits do not show which was first: the kernel closes the files of a
        # process, which makes its peers fail, before it reports the exit. So each process records
        # its own failure.
        failures = {worker.index: worker.beat().failed for worker in ended}

        def when(worker: WorkerProcess) -> tuple[bool, float]:
            return worker.code not in KILLED, failures[worker.index] or worker.ended

        return min(failed, key=when)

    def _dump(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            worker.dump()
        deadline, before, settled = time.monotonic() + DUMP, [], 0
        while workers and settled < SETTLED and time.monotonic() < deadline:
            sizes = [len(worker.stacks()) for worker in workers]
            settled = settled + 1 if all(sizes) and sizes == before else 0
            before = sizes
            time.sleep(POLL)


def _write_stacks(workers: Sequence[WorkerProcess], run: Path | None) -> str:
    """Write the stacks into a run's directory and return the path; else return the stacks."""
    stacks = {worker.index: text for worker in workers if (text := worker.stacks())}
    if run is None or not run.is_dir():
        shown = [f"process {i}:\n{x.decode(errors='replace')}" for i, x in stacks.items()]
        return "\n" + "".join(shown) if shown else ""
    for index, text in stacks.items():
        with contextlib.suppress(OSError), create_new(run / f"stacks-{index}.txt") as file:
            file.write(text)
    return f"{run}/stacks-*.txt"
