"""Process group: processes that start and end together, watched from outside."""

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from jtrain.distributed.heartbeat import ALONE, PHASES, STACKS, Beat, Channel, read_beat
from jtrain.distributed.shutdown import ASKS
from jtrain.distributed.watchdog import Patience, WatchedProcess
from jtrain.errors import DONE, HUNG, MISTAKE, STOPPED
from jtrain.io.formatting import signal_name
from jtrain.io.regular_files import create_new

TAIL = 400  # lines of its last output that are kept
SLICE = 0.05  # seconds of one of many short waits: a machine that stalls uses up one of them
# A wrapper that makes Linux kill the command when its launcher is gone, killed for example, by
# prctl(PR_SET_PDEATHSIG, SIGKILL). It is a process of its own, since JAX warns about code that runs
# after a fork.
_TIE = """
import ctypes, os, sys
tie = getattr(ctypes.CDLL(None), "prctl", None)
if tie: tie(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_TIED = (sys.executable, "-I", "-S", "-c", _TIE)


class WorkerProcess:
    """A process on this machine, in a `with` block; its children end with it.

    The output of process 0 goes to the output of this process. The output of the others is kept in
    case they fail.
    """

    def __init__(self, index: int, command: Sequence[str], environ: Mapping[str, str]):
        self.index, self.ended = index, 0.0  # time of its end, by the monotonic clock; 0: it runs
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        """The last lines of its output; of process 0, whose output is shown, perhaps none."""
        shown = index == 0
        self._channel = Channel()
        self._process = subprocess.Popen(
            [*_TIED, *command],
            env={**environ, **self._channel.environ},
            pass_fds=self._channel.files,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=subprocess.PIPE if shown else subprocess.STDOUT,  # in the order of the output
            start_new_session=True,  # Ctrl-C reaches it once, through the launcher
        )
        pipe = self._process.stderr if shown else self._process.stdout
        echo = sys.stderr if shown else None
        self._reader = threading.Thread(target=self._read, args=(pipe, echo), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)  # records the end
        self._reader.start()
        self._waiter.start()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.__exit__()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, the negative number of a signal; None while it runs."""
        return self._process.returncode if self.ended else None

    @property
    def stopped(self) -> bool:
        """True if a signal such as SIGSTOP has stopped it; always False without /proc."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def beat(self) -> Beat:
        """Return its last beat; number 0 without a heartbeat."""
        return read_beat(self._channel.files.beats)

    def stacks(self) -> bytes:
        """Return the stacks that it has written; empty before."""
        return self._channel.stacks()

    def signal(self, number: int) -> None:
        """Forward a signal, if it still runs."""
        if self.code is None:
            self._process.send_signal(number)

    def dump(self) -> None:
        """Make it write the stacks of its threads; a stopped process is resumed for this."""
        self.signal(STACKS)
        self.signal(signal.SIGCONT)

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 plus the number of a signal."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def exit_reason(self) -> str:
        """Reason of its end: `exit code 70`, `SIGKILL`."""
        code = self.code or 0
        return f"exit code {code}" if code >= 0 else signal_name(-code)

    @property
    def hidden_output(self) -> str:
        """Its last output; empty for process 0, whose output was shown at once."""
        return "" if self.index == 0 else "".join(self.tail)

    def kill(self) -> None:
        """Kill it with all its children; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._waiter.join()
        self.drain(1.0)

    def drain(self, seconds: float) -> None:
        """Wait for the last output of a process that ended; a child may still have the pipe."""
        for _ in range(round(seconds / SLICE)):
            self._reader.join(timeout=SLICE)

    def _wait(self) -> None:
        self._process.wait()
        self.ended = time.monotonic()

    def _read(self, pipe: IO[bytes], echo: IO[str] | None) -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                self.tail.append(text)
                if echo is not None:
                    with contextlib.suppress(OSError, ValueError):  # the output is closed
                        echo.write(text)
                        echo.flush()


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
